"""Plans which tokens of which prompts a step computes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from engine.memory.cache_formats import ExactCuts
from engine.request import Request
from engine.row_kinds import PlannedRow, is_decode_row
from engine.schedule.cache_modes import CacheMode
from engine.schedule.decode_rows import DecodeRows
from engine.schedule.ownership import Ownership

LARGEST_RESERVE = 2
"""Short prompts behind a long one get at most this fraction of a step's tokens: a half. So the long one goes
on, however many of them come."""


class PromptChunks:
    """Plans a step's prefill rows, oldest request first.

    A prompt of which more than ``long_threshold`` tokens are missing leaves room for shorter ones that came
    after it: otherwise one of 100,000 tokens would hold up everybody's for many steps.

    Other prompts share a step only while they have at most ``joined_tokens`` together: every prompt of a step
    waits for the step's end, so a step should not be larger than the device needs to be busy.
    """

    def __init__(
        self,
        owned: Ownership,
        mode: CacheMode,
        decode: DecodeRows,
        *,
        cuts: ExactCuts | None,
        num_positions: int,
        long_threshold: int,
        joined_tokens: float,
    ) -> None:
        self._owned = owned
        self._mode = mode
        self._decode = decode
        self._cuts = cuts
        self._num_positions = num_positions
        self._long_threshold = long_threshold
        self._joined_tokens = joined_tokens

    def plan(
        self, running: Iterable[Request], budget: int, decode_rows: list[PlannedRow]
    ) -> list[PlannedRow]:
        """Plans chunks of ``budget`` tokens in all. A chunk of one token may be a decode row; such rows are
        appended to ``decode_rows``."""
        planned = {row.request.request_id for row in decode_rows}
        unplanned = [
            one for one in running if one.request_id not in planned and one.num_planned < one.plannable
        ]
        prefill_rows: list[PlannedRow] = []
        joined = math.inf if unplanned and self._is_long(unplanned[0]) else self._joined_tokens
        for index, request in enumerate(unplanned):
            if budget <= 0 or (prefill_rows and request.plannable - request.num_planned > joined):
                break
            start = request.num_planned
            reserve = self._reserve(request, unplanned[index + 1 :], budget)
            end = self._end(request, start, budget - reserve)
            if end == start and reserve:  # too little room for the grid of exact cuts
                end = self._end(request, start, budget)
            if end == start:
                break
            if end == request.target and request.awaits_masks:
                continue
            if is_decode_row(num_new=end - start, num_before=start, chunks_until=request.chunks_until):
                if budget < self._num_positions:
                    break
                decode_rows.append(self._decode.plan_as_is(request, start))
                budget -= self._num_positions
            else:
                boundaries = self._owned.take_boundaries(request, start, end)
                prefill_rows.append(PlannedRow(request, start, end - start, boundaries))
                if prefill_rows[-1].samples:
                    self._decode.grow_if_room(request, end)
                budget -= end - start
                joined -= end - start
        return prefill_rows

    def _end(self, request: Request, start: int, room: int) -> int:
        """Returns the end of a chunk that starts at ``start`` and has room for ``room`` tokens. Returns
        ``start`` if that is too little."""
        end = min(request.plannable, start + room)
        if self._cuts is not None:
            end = self._cuts.chunk_end(request.num_given, start, end)
            if end == start:
                return start
        return self._mode.chunk_end(request, start, end)

    def _reserve(self, request: Request, behind: Sequence[Request], budget: int) -> int:
        """Returns the number of tokens that a long prompt leaves to shorter ones behind it."""
        if not self._is_long(request):
            return 0
        missing = (one.plannable - one.num_planned for one in behind)
        wanted = sum(num for num in missing if num <= self._long_threshold)
        return min(wanted, budget // LARGEST_RESERVE)

    def _is_long(self, request: Request) -> bool:
        return request.plannable - request.num_planned > self._long_threshold
