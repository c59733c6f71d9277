"""What a start weighs and what it saves: bytes of a block and of a state, FLOP of computing tokens. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StartSizes:
    """Sizes of one rank. All lengths are in blocks from the prompt's start."""

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
        num_tokens = (end - start) * self.block_tokens
        pairs = num_tokens * (start * self.block_tokens + (num_tokens + 1) / 2)
        return num_tokens * self.token_flops + pairs * self.pair_flops

    def is_worth_copying(self, start: int, end: int, num_blocks: int, flops_per_byte: float) -> bool:
        """Whether ``num_blocks`` blocks and a state are copied sooner than the blocks from ``start`` to
        ``end`` are computed, on a device that computes ``flops_per_byte`` FLOP while it copies a byte."""
        num_bytes = num_blocks * self.block_bytes + self.slot_bytes
        return self.flops(start, end) >= flops_per_byte * num_bytes
