"""The arguments for rows and states that the kernels of all recurrent layers take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.jit import FlatArray
from kernels.formats.stochastic_round import GRID_TOKENS, StateRounding
from kernels.gpu.strides import adjacent
from kernels.ssm.boundaries import Segments


def flat_rows(*operands: Tensor) -> Iterator[Any]:
    """Yield operands for a CPU kernel: each flat in float32, followed by its first strides, at most three."""
    for operand in operands:
        rows = adjacent(operand.float())
        yield from (FlatArray(rows), rows.stride()[:3])


def decode_states(
    pool: Tensor, read_slots: Tensor, write_slots: Tensor, seq_lens: Tensor | None, rounding: StateRounding
) -> tuple[Any, ...]:
    """Return arguments for a CPU kernel: the states that decode rows read and write in place."""
    lengths = read_slots if seq_lens is None else seq_lens
    slots = read_slots, write_slots.contiguous(), lengths
    return FlatArray(pool), pool.stride()[:3], *slots, rounding.arguments


def scan_states(pool: Tensor, segments: Segments, rounding: StateRounding) -> tuple[Any, ...]:
    """Return arguments for a CPU kernel: the states of a prefill's segments."""
    return FlatArray(pool), *pool.stride()[:3], *segments.as_arguments(), rounding.arguments


def scan_launch(
    pool: Tensor, segments: Segments, rounding: StateRounding, chunk: int
) -> tuple[int, int, tuple[Any, ...], tuple[int, ...], dict[str, Any]]:
    """Return for Triton: tokens per chunk (``chunk``, but GRID_TOKENS at most: a row that is cut at its
    multiples has the chunks of the uncut row), the maximum number of chunks per segment,
    the kernels' pointers (``pool_ptr`` … ``row_starts_ptr``) and numbers (``slot_stride`` … ``first_head``),
    and their constants."""
    *rows, has_initial = segments.as_rows()
    is_narrow = pool.dtype == torch.bfloat16
    chunk = min(chunk, GRID_TOKENS)
    most_tokens = segments.max_seq_len + (chunk - 1 if is_narrow else 0)
    pointers = pool, *rows, has_initial.view(torch.uint8), segments.num_before, segments.row_starts
    numbers = *pool.stride()[:3], rounding.signed_seed, rounding.first_head
    flags = {"ROUNDED": is_narrow, "STOCHASTIC": rounding.is_stochastic, "GRID": GRID_TOKENS}
    flags["HAS_BOUNDARIES"] = segments.row_starts is not None
    return chunk, -(-most_tokens // chunk), pointers, numbers, flags
