"""A scheduler without an engine."""

from __future__ import annotations

from engine.schedule.cache_modes import make_cache_mode
from engine.schedule.capacity import CapacityPlan
from engine.schedule.scheduler import Scheduler


def capacity(num_blocks=33, num_slots=5, block_size=4, max_model_len=64, k=0):
    return CapacityPlan(num_blocks, num_slots, block_size, 1, 1, max_model_len, k)


def make_scheduler(
    max_num_seqs=4,
    max_batch_tokens=8,
    mode="none",
    state_block=8,
    k=0,
    long_prefill_threshold=None,
    joined_prompt_tokens=None,
    **sizes,
):
    plan = capacity(k=k, **sizes)
    return Scheduler(
        plan,
        make_cache_mode(mode, plan.block_size, state_block),
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        num_positions=1 + k,
        long_prefill_threshold=long_prefill_threshold,
        joined_prompt_tokens=joined_prompt_tokens,
    )


def land(scheduler, plan, num_accepted=1):
    """Do what the engine does when a step is read back: for each decode row that samples, ``num_accepted``
    tokens were right."""
    for row in plan.rows:
        accepted = num_accepted if row.is_decode and row.samples else 1
        if row.samples:
            row.request.tokens += [0] * accepted
        scheduler.landed(row, accepted)


def compute(scheduler, plan, num_accepted=1):
    """Do what the engine does to requests in a step."""
    scheduler.launched(plan)
    land(scheduler, plan, num_accepted)
