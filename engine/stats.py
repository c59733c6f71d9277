"""The stats that an engine sends to routers: its present load and memory, and what it has computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.request import Request
from engine.row_kinds import PlannedRow
from engine.schedule.scheduler import Scheduler
from engine.step.launched_step import RowResult
from wire.messages.generation import ServerStats


class EngineStats:
    """Counts steps, tokens and drafts. ``num_drafts``: maximum number of drafts that a row tries in a
    step."""

    def __init__(self, num_drafts: int) -> None:
        self.num_steps = 0
        self._prefill_tokens = 0
        self._decode_tokens = 0
        self._drafted = [0] * num_drafts
        """For each position after the newest token, the number of drafts that rows tried there."""
        self._accepted = [0] * num_drafts

    def count(self, row: PlannedRow, result: RowResult) -> None:
        """Counts one row of one step, or of a burst."""
        if row.num_before < row.request.num_given:
            self._prefill_tokens += row.num_new
        if row.samples:
            for num_tried, accepted in result.steps:
                self.count_decoded([row.request], [num_tried], [accepted])

    def count_decoded(
        self, requests: Sequence[Request], num_tried: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Counts one step's rows that all sampled, and adds their drafts to the counts of their requests."""
        self._decode_tokens += sum(accepted)
        if not any(num_tried):
            return
        for request, tried, gained in zip(requests, num_tried, accepted, strict=True):
            request.measured.num_drafted += tried
            request.measured.num_accepted += max(0, gained - 1)
        for (tried, gained), num_rows in Counter(zip(num_tried, accepted, strict=True)).items():
            for position in range(tried):
                self._drafted[position] += num_rows
            for position in range(gained - 1):
                self._accepted[position] += num_rows

    def now(self, scheduler: Scheduler) -> ServerStats:
        """Returns the stats with the present load and memory; the transfer layer's fields are 0."""
        owned = scheduler.owned
        quarantined = scheduler.quarantined.values()
        queues = (scheduler.waiting, scheduler.forks.waiting, scheduler.transferring, scheduler.preempted)
        return ServerStats(
            num_waiting=sum(map(len, queues)),
            num_running=len(scheduler.running),
            num_blocks=owned.blocks.capacity,
            free_blocks=owned.cache.num_available_blocks,
            cached_blocks=owned.cache.num_cached_blocks,
            num_slots=owned.slots.capacity,
            free_slots=owned.cache.num_available_slots,
            cached_states=owned.cache.num_cached_states,
            preemptions=scheduler.num_preemptions,
            given_rows=scheduler.num_given_rows,
            num_steps=self.num_steps,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            drafted_by_position=tuple(self._drafted),
            accepted_by_position=tuple(self._accepted),
            quarantined_blocks=sum(len(one.memory.own_blocks) for one in quarantined),
            quarantined_slots=sum(len(one.memory.slots) for one in quarantined),
            queued_tokens=scheduler.num_queued_tokens,
            prefix_version=owned.cache.journal.version,
        )
