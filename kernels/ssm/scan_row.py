"""The parts of a Triton program that are the same for every recurrence. boundaries.py explains segments."""

from __future__ import annotations

from kernels.formats.stochastic_round import round_state, rounding_key
from kernels.gpu.triton_jit import tl, triton_jit


@triton_jit
def chunk_of_segment(cu_seqlens_ptr, num_before_ptr, CHUNK: tl.constexpr, ROUNDED: tl.constexpr):
    """Return positions for the program of chunk ``program_id(1)`` of segment ``program_id(2)``.

    These are the segment's first token, the chunk's first token (which may be before the segment if states
    are ROUNDED), and the number of tokens from the chunk's first token to the segment's end.
    """
    start = tl.load(cu_seqlens_ptr + tl.program_id(2)).to(tl.int64)
    first = start + tl.program_id(1) * CHUNK
    if ROUNDED:
        first -= tl.load(num_before_ptr + tl.program_id(2)) % CHUNK
    return start, first, tl.load(cu_seqlens_ptr + tl.program_id(2) + 1) - first


@triton_jit
def segments_of_row(row_starts_ptr, row, HAS_BOUNDARIES: tl.constexpr):
    """Return the first segment of the row, and the first segment of the next row."""
    first, behind = row, row + 1
    if HAS_BOUNDARIES:
        first, behind = tl.load(row_starts_ptr + row), tl.load(row_starts_ptr + row + 1)
    return first, behind


@triton_jit
def fill_padding_row(columns, stride, live_columns, start, end, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Store zeros to outputs ``columns`` [BLOCK] of tokens ``start`` to ``end``.

    The outputs of two neighbouring tokens are ``stride`` apart.
    """
    zeros = tl.zeros((CHUNK, BLOCK), columns.dtype.element_ty)
    for first in range(start, end, CHUNK):
        tokens = (first + tl.arange(0, CHUNK)).to(tl.int64)
        live = (tokens < end)[:, None] & live_columns[None, :]
        tl.store(columns[None, :] + tokens[:, None] * stride, zeros, mask=live)


@triton_jit
def initial_state(pool, slot_stride, live, read_slots_ptr, has_initial_ptr, segment):
    """Return the read slot's tile, or zeros, in float32, with the shape of ``pool`` and ``live``."""
    state = tl.zeros(live.shape, tl.float32)
    if tl.load(has_initial_ptr + segment) != 0:
        source = tl.load(read_slots_ptr + segment).to(tl.int64)
        state += tl.load(pool + source * slot_stride, mask=live, other=0.0).to(tl.float32)
    return state


@triton_jit
def round_behind_chunk(
    state, pool, elements, layer_seed, head, position, is_last, STOCHASTIC: tl.constexpr, GRID: tl.constexpr
):
    """Return the state after ``position`` tokens: rounded at a multiple of GRID and if ``is_last``."""
    if (position % GRID == 0) | is_last:
        key = rounding_key(layer_seed, head, position)
        state = round_state(state, key, elements, pool.dtype.element_ty, STOCHASTIC)
    return state


@triton_jit
def fill_padding_positions(outputs, stride, live, NUM_POSITIONS: tl.constexpr, BLOCK: tl.constexpr):
    """Store zeros to ``outputs`` [BLOCK] of all positions of a decode row. Positions are ``stride`` apart."""
    for i in tl.static_range(NUM_POSITIONS):
        zeros = tl.zeros((BLOCK,), outputs.dtype.element_ty)
        tl.store(outputs + i * stride, zeros, mask=live)


@triton_jit
def leave_position(
    state, pool, slot_stride, live, elements, write_slots_ptr, seq_lens_ptr, row, i, layer_seed, head,
    NUM_POSITIONS: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Store the state after position i of a decode row, except to slot 0; return the rounded state."""
    position = tl.load(seq_lens_ptr + row) - NUM_POSITIONS + i + 1 if STOCHASTIC else 0
    key = rounding_key(layer_seed, head, position)
    state = round_state(state, key, elements, pool.dtype.element_ty, STOCHASTIC)
    target = tl.load(write_slots_ptr + row * NUM_POSITIONS + i).to(tl.int64)
    if target != 0:
        tl.store(pool + target * slot_stride, state.to(pool.dtype.element_ty), mask=live)
    return state


@triton_jit
def time_step(biased, dt_min, dt_max):
    """Return Mamba-2's ``clamp(softplus(biased), dt_min, dt_max)`` for biased = dt + dt_bias in float32.

    NaN stays NaN.
    """
    # Above 20, softplus(x) equals x to float32's last digit, and exp would overflow at 89.
    e = tl.exp(tl.where(biased > 20.0, 20.0, biased))
    # log1p(e): the rounding of 1 + e cancels between numerator and denominator (Kahan).
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    step = tl.where(biased > 20.0, biased, log1p)
    step = tl.where(step < dt_min, dt_min, step)
    return tl.where(step > dt_max, dt_max, step)
