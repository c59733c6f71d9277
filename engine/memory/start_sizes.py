"""What a start weighs and what it saves: bytes of a block and of a state, FLOP of computing tokens. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from engine.memory.prefix_journal import ReadCost

LONG_STATES = 2
"""A prompt whose KV weighs as much as so many states is a long one. Its FLOP count twice."""


@dataclass(frozen=True)
class StartSizes:
    """Sizes of one rank. Lengths are in blocks from the prompt's start unless it says tokens."""

    block_tokens: int
    block_bytes: int
    """Bytes of a block's KV; 0 if the model keeps none."""
    slot_bytes: int
    token_flops: float
    """FLOP of one token in all layers, without the pairs of attention."""
    pair_flops: float
    """FLOP for one pair of a token and a token that it attends to, in all attention layers."""

    def flops(self, start: int, end: int) -> float:
        """Returns the FLOP of computing the blocks from ``start`` up to ``end`` behind a start."""
        return self.token_range_flops(start * self.block_tokens, end * self.block_tokens)

    def token_range_flops(self, start: int, end: int) -> float:
        """Returns the FLOP of computing the tokens from ``start`` up to ``end``, counted in tokens."""
        num_tokens = end - start
        pairs = num_tokens * (start + (num_tokens + 1) / 2)
        return num_tokens * self.token_flops + pairs * self.pair_flops

    def weighed_flops(self, start: int, end: int) -> float:
        """Returns :meth:`flops`, which count the more the more they are: twice for those of a long prompt."""
        flops = self.flops(start, end)
        return flops * (1.0 + min(1.0, flops / self._long_flops))

    @cached_property
    def _long_flops(self) -> float:
        return self.flops(0, max(1, round(LONG_STATES * self.blocks_per_state)))

    @property
    def blocks_per_state(self) -> float:
        """Number of blocks whose KV weighs as much as a state."""
        return max(1, self.slot_bytes) / max(1, self.block_bytes)

    def is_worth_copying(self, start: int, end: int, num_blocks: int, flops_per_byte: float) -> bool:
        """Whether ``num_blocks`` blocks and a state are copied sooner than the blocks from ``start`` to
        ``end`` are computed, on a device that computes ``flops_per_byte`` FLOP while it copies a byte."""
        num_bytes = num_blocks * self.block_bytes + self.slot_bytes
        return self.flops(start, end) >= flops_per_byte * num_bytes

    def read_cost(self, flops_per_byte: float) -> ReadCost:
        """Returns the cost of copying a start to such a device, counted in tokens at a prompt's beginning."""
        tokens_per_byte = flops_per_byte / self.token_flops
        return ReadCost(
            self.slot_bytes * tokens_per_byte, self.block_bytes / self.block_tokens * tokens_per_byte
        )
