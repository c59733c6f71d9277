"""From a memory budget to numbers of blocks and slots, or a refusal that shows the arithmetic.

Nothing is capped in silence: a batch, a context or a pool that does not fit is the operator's
decision, so the error names what is missing and which flag gives way.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.caches import CacheSpec
from wire.errors import CapacityError
from wire.handoff import Role


@dataclass(frozen=True)
class CapacityPlan:
    """Sizes of both pools, null entries included."""

    num_blocks: int
    num_slots: int
    block_size: int
    block_bytes: int
    slot_bytes: int
    max_model_len: int

    @property
    def blocks_per_seq(self) -> int:
        """Columns of a block table: blocks of one sequence of ``max_model_len`` tokens."""
        return blocks_for(self.max_model_len, self.block_size)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes + self.num_slots * self.slot_bytes


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


def plan_capacity(
    spec: CacheSpec,
    *,
    role: Role,
    budget_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    block_size: int,
    num_cached_states: int = 0,
) -> CapacityPlan:
    """Divides ``budget_bytes`` between slots, which are counted first, and blocks, which get the rest.

    A prefill server holds two states a sequence: one being computed and one leased to a decode server.
    Blocks beyond what ``max_num_seqs`` full-length sequences can use are not allocated.

    Raises :class:`CapacityError` unless the slots, the null entries and the blocks of one sequence of
    ``max_model_len`` tokens fit.
    """
    slots_per_seq = 2 if role == "prefill" else 1
    num_slots = 1 + max_num_seqs * slots_per_seq + num_cached_states
    block_bytes, slot_bytes = spec.block_bytes(block_size), spec.slot_bytes
    blocks_per_seq = blocks_for(max_model_len, block_size)
    slots_bytes = num_slots * slot_bytes
    left_bytes = budget_bytes - slots_bytes
    needed_blocks = 1 + blocks_per_seq
    if left_bytes < needed_blocks * block_bytes:
        raise CapacityError(
            f"the cache budget of {_mib(budget_bytes)} is too small: "
            f"{num_slots} state slots (1 null + {max_num_seqs} sequences x {slots_per_seq} + "
            f"{num_cached_states} cached) "
            f"x {_mib(slot_bytes)} = {_mib(slots_bytes)}, "
            f"and {needed_blocks} KV blocks (1 null + one sequence of {max_model_len} tokens at {block_size} "
            f"a block) x {_mib(block_bytes)} = {_mib(needed_blocks * block_bytes)}; "
            "raise --cache-memory, or lower --max-num-seqs, --cached-states or --max-model-len"
        )
    useful_blocks = 1 + blocks_per_seq * max_num_seqs * slots_per_seq
    num_blocks = useful_blocks if block_bytes == 0 else min(useful_blocks, left_bytes // block_bytes)
    return CapacityPlan(num_blocks, num_slots, block_size, block_bytes, slot_bytes, max_model_len)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.2f} MiB"
