"""What one step computes, as tensors: the model's and the kernels' only view of requests.

Decode rows stand before prefill rows. Decode rows are uniform (``T = 1 + k`` positions each), prefill
rows ragged. Tokens stand in row order: first the ``R * T`` decode tokens, then all prefill tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.ssm.boundaries import Boundaries


@dataclass(frozen=True)
class DecodeRows:
    """Rows that carry on from a state: ``R`` rows of ``T`` positions. Integers are int32."""

    num_rows: int
    num_positions: int
    seq_lens: Tensor
    """``[R]`` tokens including the ``T`` new ones; 0 marks a padding row."""
    block_table: Tensor
    """``[R, cols]``; entries beyond a row's length are stale and never read."""
    read_slots: Tensor
    """``[R]`` slot with the state before position 0; 0 (null) in padding rows."""
    write_slots: Tensor
    """``[R, T]`` slot that receives the state after each position; 0 writes nothing."""
    max_seq_len: int


@dataclass(frozen=True)
class PrefillRows:
    """Rows that run a stretch of prompt: ``S`` ragged rows. Integers are int32."""

    num_rows: int
    num_tokens: int
    cu_seqlens: Tensor
    """``[S + 1]`` running total of new tokens, from 0."""
    seq_lens: Tensor
    """``[S]`` tokens in all: those computed before and the new ones."""
    block_table: Tensor
    """``[S, cols]``"""
    read_slots: Tensor
    """``[S]`` slot that holds the state before."""
    write_slots: Tensor
    """``[S]`` slot that receives the state after; may be the one that is read."""
    has_initial: Tensor
    """``[S]`` bool; False starts from the zero state whatever the slot holds."""
    num_before: Tensor
    """``[S]`` tokens computed before."""
    boundaries: Boundaries | None
    """Where the scan stores states on its way through the rows."""
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True)
class Batch:
    """One forward pass of ``n`` tokens."""

    input_ids: Tensor
    """``[n]`` int64"""
    positions: Tensor
    """``[n]`` int64"""
    slot_mapping: Tensor
    """``[n]`` int64: ``block id * block_size + offset`` where each token's KV goes."""
    decode: DecodeRows | None
    prefill: PrefillRows | None

    @property
    def num_decode_tokens(self) -> int:
        return 0 if self.decode is None else self.decode.num_rows * self.decode.num_positions
