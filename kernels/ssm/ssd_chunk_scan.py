"""Prefill of a Mamba-2 layer: the SSM recurrence over ragged rows, by chunks.

    dt' = clamp(softplus(dt + dt_bias), *dt_limit)
    h_t = exp(A dt') h_{t-1} + dt' x_t B_t^T                    [P, N] per head
    y_t = h_t C_t + D x_t

There are S rows; H heads of P channels; G groups; N state columns per channel. Head h uses B and C of group
``h // (H // G)``. A state of 16 bits is rounded
(kernels/formats/stochastic_round.py) after every GRID_TOKENS tokens of its sequence, at boundaries and at the
end of a row. The scan continues from the rounded state, so a row that is cut at multiples of GRID_TOKENS
leaves the same states as the uncut row.

| device | form |
|---|---|
| CUDA | chunks of at most ``chunk_size`` tokens, with GEMMs (Triton) |
| CPU | the recurrence itself, in registers, which is faster on CPU (kernels/ssm/ssd_chunk_scan_cpu.py) |
| any, in float64 | reference |
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.jit import FlatArray
from kernels.formats.stochastic_round import NEAREST, StateRounding
from kernels.gpu.tiles import TileRequest, choose
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.ssm.boundaries import Boundaries, Segments, segments_of
from kernels.ssm.reference_row import reference_rows
from kernels.ssm.scan_row import (
    chunk_of_segment,
    fill_padding_row,
    initial_state,
    round_behind_chunk,
    segments_of_row,
    time_step,
)
from kernels.ssm.selective_state_update import reference_step, reference_tokens
from kernels.ssm.selective_state_update_cpu import scan_steps
from kernels.ssm.ssd_chunk_scan_cpu import scan_heads
from kernels.ssm.state_arguments import flat_rows, scan_launch, scan_states


def ssd_chunk_scan_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    cu_seqlens: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    has_initial: Tensor,
    *,
    dt_limit: tuple[float, float],
    boundaries: Boundaries | None = None,
    num_before: Tensor | None = None,
    rounding: StateRounding = NEAREST,
) -> Tensor:
    """Reference of :func:`ssd_chunk_scan`: the plain recurrence, one token after the other."""
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    for row in reference_rows(cu_seqlens, read_slots, write_slots, has_initial, boundaries, num_before):
        inputs = (t[row.tokens] for t in (x, dt, B, C))
        tokens = reference_tokens(inputs, A, D, dt_bias, dt_limit)
        row.scan(reference_step, tokens, ssm_state, y, rounding)
    return y


# Two launches, after "Transformers are SSMs" (Dao and Gu, 2024), section 6:
#
#   | launch                                               | one program per       |
#   |------------------------------------------------------|-----------------------|
#   | step, and the running sum of A * step in a chunk     | chunk, BLOCK_H heads  |
#   | the chunks of a row, one after the other: outputs of | row, head,            |
#   | the state before the chunk and of causal scores      | BLOCK_P of its rows   |
#   | within it, as in flash attention; then the state     |                       |
#
# The state, [N, BLOCK_P] in float32, stays in registers from a row's first token to its last: it is read and
# written once. A workspace of states between chunks would take several times the traffic of x and y. Programs
# for heads and blocks of channels fill the GPU, without programs for chunks. GEMMs take the inputs' dtype and
# accumulate in float32; float32 is passed as three TF32 terms, since one term would keep 10 bits. C B^T is
# the same for all heads of a group but is computed for each head: from cache, on tensor cores that have time
# for it.
#
# A state can be stored only at the end of a chunk, so chunks are counted from the last boundary. The first
# launch treats segments (boundaries.py) as rows, the second goes through a row's segments. For a pool of 16
# bits, chunks are counted from the sequence's first token, so that they end where the state is rounded. Then
# the first ``offset`` tokens of a segment's first chunk are before the segment.


@triton_jit
def _cumulate_decay_kernel(
    dt_ptr,
    A_ptr,
    dt_bias_ptr,
    cu_seqlens_ptr,
    num_before_ptr,
    step_ptr,
    cumulated_ptr,
    dt_stride,
    dt_min,
    dt_max,
    num_tokens,
    num_heads,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    start, first, length = chunk_of_segment(cu_seqlens_ptr, num_before_ptr, CHUNK, ROUNDED)
    if length <= 0:
        return
    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    live_heads = heads < num_heads
    A = tl.load(A_ptr + heads, mask=live_heads, other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + heads, mask=live_heads, other=0.0).to(tl.float32)
    tokens = tl.arange(0, CHUNK)
    live = ((tokens < length) & (first + tokens >= start))[:, None] & live_heads[None, :]
    dt_tile = dt_ptr + (first + tokens)[:, None] * dt_stride + heads[None, :]
    step = tl.load(dt_tile, mask=live, other=0.0).to(tl.float32) + dt_bias[None, :]
    step = tl.where(live, time_step(step, dt_min, dt_max), 0.0)
    tile = heads[None, :].to(tl.int64) * num_tokens + (first + tokens)[:, None]
    tl.store(step_ptr + tile, step, mask=live)
    tl.store(cumulated_ptr + tile, tl.cumsum(A[None, :] * step, axis=0), mask=live)


@triton_jit
def _scan_rows_kernel(
    x_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    step_ptr,
    cumulated_ptr,
    pool_ptr,
    cu_seqlens_ptr,
    read_slots_ptr,
    write_slots_ptr,
    has_initial_ptr,
    num_before_ptr,
    row_starts_ptr,
    y_ptr,
    x_stride,
    x_head_stride,
    B_stride,
    B_group_stride,
    C_stride,
    C_group_stride,
    slot_stride,
    head_stride,
    state_row_stride,
    layer_seed,
    first_head,
    num_tokens,
    num_heads,
    head_dim,
    state_dim,
    HEADS_PER_GROUP: tl.constexpr,
    ROUNDED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    GRID: tl.constexpr,
    HAS_BOUNDARIES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, blocks_p = tl.program_id(1), tl.cdiv(head_dim, BLOCK_P)
    head = tl.program_id(0) // blocks_p
    segment, next_row = segments_of_row(row_starts_ptr, row, HAS_BOUNDARIES)
    start, end = tl.load(cu_seqlens_ptr + segment), tl.load(cu_seqlens_ptr + segment + 1)
    p = tl.program_id(0) % blocks_p * BLOCK_P + tl.arange(0, BLOCK_P)
    n, t = tl.arange(0, BLOCK_N), tl.arange(0, CHUNK)
    live_p, live_n = p < head_dim, n < state_dim
    y_columns = y_ptr + head * head_dim + p
    y_stride = num_heads * head_dim
    if tl.load(write_slots_ptr + segment) == 0:  # padding: y is zero
        fill_padding_row(y_columns, y_stride, live_p, start, end, CHUNK, BLOCK_P)
        return
    if start == end:
        return

    pool = pool_ptr + head * head_stride + p[None, :] * state_row_stride + n[:, None]
    live_state = live_n[:, None] & live_p[None, :]
    h = initial_state(pool, slot_stride, live_state, read_slots_ptr, has_initial_ptr, segment)
    D = tl.load(D_ptr + head).to(tl.float32)
    x_columns = x_ptr + head * x_head_stride + p
    B_columns = B_ptr + head // HEADS_PER_GROUP * B_group_stride + n
    C_columns = C_ptr + head // HEADS_PER_GROUP * C_group_stride + n
    steps = step_ptr + head.to(tl.int64) * num_tokens
    sums = cumulated_ptr + head.to(tl.int64) * num_tokens
    causal = t[:, None] >= t[None, :]
    elements = p[None, :] * state_dim + n[:, None]
    for g in range(segment, next_row):
        end = tl.load(cu_seqlens_ptr + g + 1)
        before = tl.load(num_before_ptr + g) if ROUNDED else 0
        offset = before % CHUNK
        for first in range(start - offset, end, CHUNK):
            tokens = (first + t).to(tl.int64)
            live = (tokens >= start) & (tokens < end)
            live_x, live_bc = live[:, None] & live_p[None, :], live[:, None] & live_n[None, :]
            C = tl.load(C_columns[None, :] + tokens[:, None] * C_stride, mask=live_bc, other=0.0)
            B = tl.load(B_columns[None, :] + tokens[:, None] * B_stride, mask=live_bc, other=0.0)
            x = tl.load(x_columns[None, :] + tokens[:, None] * x_stride, mask=live_x, other=0.0)
            step = tl.load(steps + tokens, mask=live, other=0.0)
            decay = tl.load(sums + tokens, mask=live, other=0.0)
            total = tl.load(sums + tl.minimum(first + CHUNK, end) - 1)
            scores = tl.dot(C, tl.trans(B), input_precision=PRECISION)
            # Masked before the exponential: for later keys it would overflow. For queries after the end it
            # still may overflow, but their results are not stored.
            lag = tl.where(causal & live[None, :], decay[:, None] - decay[None, :], float("-inf"))
            scores = scores * tl.exp(lag) * step[None, :]
            y = tl.dot(C, h.to(C.dtype), input_precision=PRECISION) * tl.exp(decay)[:, None]
            y = tl.dot(scores.to(x.dtype), x, acc=y, input_precision=PRECISION)
            y += D * x.to(tl.float32)
            y_tile = y_columns[None, :] + tokens[:, None] * y_stride
            tl.store(y_tile, y.to(y_ptr.dtype.element_ty), mask=live_x)
            weight = tl.where(live, step * tl.exp(total - decay), 0.0)
            weighted = (x * weight[:, None]).to(B.dtype)
            h = tl.dot(tl.trans(B), weighted, acc=h * tl.exp(total), input_precision=PRECISION)
            if ROUNDED:
                position = before + tl.minimum(first + CHUNK, end) - start
                h = round_behind_chunk(
                    h, pool, elements, layer_seed, head + first_head, position, first + CHUNK >= end,
                    STOCHASTIC, GRID,
                )  # fmt: skip
        target = tl.load(write_slots_ptr + g).to(tl.int64)
        tl.store(pool + target * slot_stride, h.to(pool_ptr.dtype.element_ty), mask=live_state)
        start = end


@functools.cache
def tile_request(dtype: torch.dtype, head_dim: int, state_dim: int) -> TileRequest:
    """Request tiles for which state, scores and outputs stay in registers.

    Tiles of float32 are smaller, since each of its operands becomes three TF32 terms.
    """
    exact, block_p = dtype == torch.float32, max(16, triton.next_power_of_2(head_dim))
    return TileRequest.of(
        "ssd_chunk_scan",
        {
            "CHUNK": 16 if exact else 64,
            "BLOCK_P": min(block_p, 32 if exact else 64),
            "num_warps": 8 if exact else 4,
            "num_stages": 1 if exact else 2,
        },
        dtype=dtype,
        head_dim=head_dim,
        state_dim=state_dim,
    )


def _launch(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, ssm_state: Tensor,
    segments: Segments, chunk_size: int, dt_limit: tuple[float, float], rounding: StateRounding = NEAREST,
) -> Tensor:  # fmt: skip
    num_tokens, num_heads, head_dim = x.shape
    num_groups, state_dim = B.shape[1:]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if 0 in (segments.num_rows, num_tokens, segments.max_seq_len):
        return y
    tiles = dict(choose(tile_request(x.dtype, head_dim, state_dim), x.device))
    chunk = min(tiles["CHUNK"], max(16, triton.next_power_of_2(chunk_size)))
    tiles["CHUNK"], num_chunks, rows, places, flags = scan_launch(ssm_state, segments, rounding, chunk)
    block_h = min(triton.next_power_of_2(num_heads), 16)
    step, cumulated = torch.empty((2, num_heads, num_tokens), dtype=torch.float32, device=x.device)
    _cumulate_decay_kernel[(triton.cdiv(num_heads, block_h), num_chunks, len(segments.write_slots))](
        dt, A, dt_bias, segments.cu_seqlens, segments.num_before, step, cumulated, dt.stride(0), *dt_limit,
        num_tokens, num_heads, CHUNK=tiles["CHUNK"], BLOCK_H=block_h, ROUNDED=flags["ROUNDED"],
    )  # fmt: skip
    _scan_rows_kernel[(num_heads * triton.cdiv(head_dim, tiles["BLOCK_P"]), segments.num_rows)](
        x, B, C, D, step, cumulated, *rows, y,
        *x.stride()[:2], *B.stride()[:2], *C.stride()[:2], *places, num_tokens, num_heads, head_dim,
        state_dim, HEADS_PER_GROUP=num_heads // num_groups,
        BLOCK_N=max(16, triton.next_power_of_2(state_dim)),
        PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32",  # no effect on other dtypes
        **flags, **tiles,
    )  # fmt: skip
    return y


def _scan_on_cpu(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, ssm_state: Tensor,
    segments: Segments, dt_limit: tuple[float, float], rounding: StateRounding,
) -> Tensor:  # fmt: skip
    num_tokens, num_heads, head_dim = x.shape
    num_groups, state_dim = B.shape[1:]
    step, decay = torch.empty(2, num_heads, num_tokens).unbind()
    scan_steps.parallel_for(
        num_heads,
        1 + _GRAIN_STEPS // (1 + num_tokens),
        *(t.float() for t in (dt, dt_bias, A)),
        (np.float32(dt_limit[0]), np.float32(dt_limit[1])),
        step,
        decay,
    )
    y = torch.empty(x.shape)
    scan_heads.parallel_for(
        num_heads,
        1 + _GRAIN_ELEMENTS // (1 + num_tokens * head_dim * state_dim),
        *flat_rows(x, B, C),
        step,
        decay,
        D.float(),
        num_groups,
        head_dim,
        state_dim,
        *scan_states(ssm_state, segments, rounding),
        FlatArray(y),
    )
    return y.to(x.dtype)


_GRAIN_ELEMENTS = 2**20  # tokens times elements of state, about 100 µs
_GRAIN_STEPS = 2**12  # tokens times heads, about 100 µs


def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    cu_seqlens: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    has_initial: Tensor,
    *,
    chunk_size: int,
    dt_limit: tuple[float, float],
    max_seq_len: int,
    boundaries: Boundaries | None = None,
    num_before: Tensor | None = None,
    rounding: StateRounding = NEAREST,
) -> Tensor:
    """Scan the ragged rows of a prefill batch and store each row's last state in its write slot.

    x ``[num_tokens, H, P]``, dt ``[num_tokens, H]``, A, D and dt_bias ``[H]``, B and C
    ``[num_tokens, G, N]``, ssm_state ``[num_slots, H, P, N]``, cu_seqlens ``[S + 1]``, read_slots,
    write_slots and has_initial ``[S]``. Row s starts from ``read_slots[s]`` if ``has_initial[s]``, else
    from zeros. A row may write the slot that it reads, but no slot that another row reads. The states at
    ``boundaries`` are stored as well. The pool is float32, or bfloat16 rounded by ``rounding``; bfloat16
    needs num_before ``[S]`` int32, each row's number of tokens before this batch. Returns y
    ``[num_tokens, H, P]``, zero in padding rows (write slot 0).
    """
    assert num_before is not None or ssm_state.dtype != torch.bfloat16
    operands = (x, dt, A, B, C, D, dt_bias, ssm_state)
    rows = (cu_seqlens, read_slots, write_slots, has_initial)
    if x.dtype == torch.float64:
        return ssd_chunk_scan_reference(
            *operands,
            *rows,
            dt_limit=dt_limit,
            boundaries=boundaries,
            num_before=num_before,
            rounding=rounding,
        )
    segments = segments_of(boundaries, rows, num_before, max_seq_len)
    if x.is_cuda:
        return _launch(*operands, segments, chunk_size, dt_limit, rounding)
    return _scan_on_cpu(*operands, segments, dt_limit, rounding)
