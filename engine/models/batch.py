"""The input of one step, as tensors. The model and the kernels see nothing else of a request.

Decode rows come before prefill rows. All decode rows have ``T = 1 + k`` positions, one for a known token and
k for drafts. Prefill rows differ in length. Tokens are in row order: first the ``R * T`` decode tokens, then
all prefill tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.linear.joined_rows import joined_rows
from kernels.replay.kept_inputs import PendingRows
from kernels.ssm.boundaries import Boundaries


@dataclass(frozen=True)
class DecodeRows:
    """Rows that continue from a stored state: ``R`` rows of ``T`` positions. Integers are int32."""

    num_rows: int
    num_positions: int
    seq_lens: Tensor
    """``[R]`` number of tokens including the ``T`` new ones; 0 marks a padding row."""
    block_table: Tensor
    """``[R, columns]`` block ids; entries after a row's last block are stale and never read."""
    read_slots: Tensor
    """``[R]`` slot that holds the state before position 0; 0 (null) in padding rows."""
    write_slots: Tensor
    """``[R, T]`` slot that receives the state after each position; 0 if this state is not written."""
    max_seq_len: int
    pending: PendingRows | None = None
    """Given if rows replay: then the state before position 0 lacks the pending tokens, and ``write_slots``
    are not used."""


@dataclass(frozen=True)
class PrefillRows:
    """Rows that compute a chunk of a prompt: ``S`` rows of different lengths. Integers are int32."""

    num_rows: int
    num_tokens: int
    cu_seqlens: Tensor
    """``[S + 1]`` running total of new tokens, from 0."""
    seq_lens: Tensor
    """``[S]`` number of all tokens, the earlier ones and the new ones."""
    block_table: Tensor
    """``[S, columns]`` block ids"""
    read_slots: Tensor
    """``[S]`` slot that holds the state before the row's first new token."""
    write_slots: Tensor
    """``[S]`` slot that receives the state after the row's last token; may be the row's read slot."""
    has_initial: Tensor
    """``[S]`` bool; a row with False starts from the zero state and ignores the slot's content."""
    num_before: Tensor
    """``[S]`` number of tokens that earlier steps computed."""
    boundaries: Boundaries | None
    """Positions inside the rows whose states the scan stores."""
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
    """``[n]`` int64: ``block id * block_size + offset``, the place of each token's KV."""
    decode: DecodeRows | None
    prefill: PrefillRows | None

    @property
    def num_decode_tokens(self) -> int:
        return 0 if self.decode is None else self.decode.num_rows * self.decode.num_positions


def joined(outputs: list[Tensor]) -> Tensor:
    """Return a layer's outputs for decode rows and prefill rows in one tensor."""
    return outputs[0] if len(outputs) == 1 else joined_rows(*outputs)
