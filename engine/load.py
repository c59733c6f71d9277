"""Load and memory of an engine, in figures."""

from __future__ import annotations

from engine.scheduler import Scheduler
from engine.work_counts import WorkCounts
from wire.generation import ServerStats


def load_of(scheduler: Scheduler, counts: WorkCounts) -> ServerStats:
    """As they are now; what the transfer layer knows is 0."""
    owned = scheduler.owned
    quarantined = scheduler.quarantined.values()
    return ServerStats(
        num_waiting=len(scheduler.waiting) + len(scheduler.transferring) + len(scheduler.preempted),
        num_running=len(scheduler.running),
        num_blocks=owned.blocks.capacity,
        free_blocks=owned.cache.num_available_blocks,
        cached_blocks=owned.cache.num_cached_blocks,
        num_slots=owned.slots.capacity,
        free_slots=owned.cache.num_available_slots,
        cached_states=owned.cache.num_cached_states,
        preemptions=scheduler.num_preemptions,
        given_rows=scheduler.num_given_rows,
        num_steps=counts.num_steps,
        prefill_tokens=counts.prefill_tokens,
        decode_tokens=counts.decode_tokens,
        drafted_by_position=tuple(counts.drafts.drafted),
        accepted_by_position=tuple(counts.drafts.accepted),
        quarantined_blocks=sum(owned.num_own_blocks(one) for one in quarantined),
        quarantined_slots=sum(len(one.slots) for one in quarantined),
        queued_tokens=scheduler.num_queued_tokens,
        prefix_version=owned.cache.journal.version,
    )
