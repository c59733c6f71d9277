"""Prefill of a Gated DeltaNet layer (arXiv:2412.06464): its recurrence over ragged rows, by chunks.

    g    = A softplus(a + dt_bias),   beta = sigmoid(b)
    k'   = k / sqrt(sum k^2 + 1e-6),  q' = q / sqrt(sum q^2 + 1e-6) / sqrt(Dk)
    S_t  = exp(g) S_{t-1}
    S_t += beta (v_t - S_t k'_t) k'_t^T                         [Dv, Dk] per value head
    o_t  = S_t q'_t

Hk and Hv are the numbers of key and value heads, Dk and Dv their channels. Value head h uses q and k of key
head ``h // (Hv // Hk)``. kernels/gated_delta/gated_delta_update.py describes the layout of the state.

| device | form |
|---|---|
| CUDA | chunks; one triangular system gives all updates of a chunk (WY form), with GEMMs (Triton) |
| CPU | the recurrence itself, its state in the first-level cache (gated_delta_chunk_cpu.py) |
| any, in float64 | reference |
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.jit import FlatArray
from kernels.formats.stochastic_round import NEAREST, StateRounding
from kernels.gated_delta.gated_delta_chunk_cpu import scan_gates, scan_heads
from kernels.gated_delta.gated_delta_update import reference_scan
from kernels.gated_delta.gated_delta_update_cpu import NORM_EPS
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
from kernels.ssm.state_arguments import flat_rows, scan_launch, scan_states

CHUNK_TOKENS = 64
"""Tokens per chunk on a GPU for which no tiles were measured. Chunks of float32 have fewer tokens."""


def gated_delta_chunk_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    has_initial: Tensor,
    *,
    boundaries: Boundaries | None = None,
    num_before: Tensor | None = None,
    rounding: StateRounding = NEAREST,
) -> Tensor:
    """Reference of :func:`gated_delta_chunk`: the plain recurrence, one token after the other."""
    rows = reference_rows(cu_seqlens, read_slots, write_slots, has_initial, boundaries, num_before)
    return reference_scan(rows, q, k, v, a, b, A, dt_bias, state, rounding)


# Let C be a chunk's number of tokens, G the running sum of g in a chunk, D_ij = exp(G_i - G_j), and S the
# state before the chunk. The updates U [C, Dv] that the chunk's tokens write are the solution of a triangular
# system; everything else is products:
#
#     (1 + L) U = beta (V - exp(G) K' S^T),       L_ij = beta_i (k'_i k'_j) D_ij for j < i, else 0
#     O = exp(G) Q' S^T + (Q' K'^T D, j <= i) U,     S <- exp(G_C) S + U^T (exp(G_C - G) K')
#
#   | launch                                                             | one program per     |
#   |--------------------------------------------------------------------|---------------------|
#   | beta, G and the norms of q and k; T = (1 + L)^-1, [C, C]           | chunk, value head   |
#   | the chunks of a row, one after the other: U = T (...), outputs and | row, value head,    |
#   | the state after the chunk                                          | BLOCK_V of its rows |
#
# The inverse is built by doubling its diagonal blocks (Schur complement). In a block twice as large, the
# lower left quarter is -T22 L21 T11. For all blocks at once this is -T M T, where M is L in those quarters
# and 0 elsewhere.
# This is as stable as substitution. The product (1 - L)(1 + L^2)(1 + L^4)... is equally short but not stable:
# with equal keys its terms reach 10^17 and cancel.
#
# As in ssd_chunk_scan.py, the state, [Dk, BLOCK_V] in float32, stays in registers from a row's first token
# to its last. GEMMs take the inputs' dtype and accumulate in float32; float32 is passed as three TF32 terms.
# Chunks are counted from the last boundary, or for a pool of 16 bits from the sequence's first token, so that
# they end where the state is rounded. GEMMs take q and k as they are in memory, loaded while the previous
# chunk is computed; the results are then divided by the norms of q and k.


@triton_jit
def _solve_chunks_kernel(
    q_ptr,
    k_ptr,
    a_ptr,
    b_ptr,
    A_ptr,
    dt_bias_ptr,
    cu_seqlens_ptr,
    num_before_ptr,
    beta_ptr,
    cumulated_ptr,
    q_scale_ptr,
    k_scale_ptr,
    solution_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    a_stride,
    b_stride,
    scale,
    norm_eps,
    num_tokens,
    key_dim,
    HEADS_PER_KEY_HEAD: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    start, first, length = chunk_of_segment(cu_seqlens_ptr, num_before_ptr, CHUNK, ROUNDED)
    if length <= 0:
        return
    i, columns = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    tokens, live = first + i, i < length
    if ROUNDED:
        live = live & (tokens >= start)
    live_tile = live[:, None] & (columns < key_dim)[None, :]
    key_head = head // HEADS_PER_KEY_HEAD
    q_tile = q_ptr + key_head * q_head_stride + tokens[:, None] * q_stride + columns[None, :]
    k_tile = k_ptr + key_head * k_head_stride + tokens[:, None] * k_stride + columns[None, :]
    k = tl.load(k_tile, mask=live_tile, other=0.0)
    q = tl.load(q_tile, mask=live_tile, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + tokens * a_stride + head, mask=live, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + tokens * b_stride + head, mask=live, other=0.0).to(tl.float32)
    A = tl.load(A_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)

    beta = tl.sigmoid(b)
    log_decay = A * time_step(a + dt_bias, 0.0, float("inf"))
    if ROUNDED:
        log_decay = tl.where(live, log_decay, 0.0)
    cumulated = tl.cumsum(log_decay, axis=0)
    q_scale = scale / tl.sqrt(tl.sum(q * q, axis=1) + norm_eps)
    k_squares = k.to(tl.float32) * k.to(tl.float32)
    k_scale = 1.0 / tl.sqrt(tl.sum(k_squares, axis=1) + norm_eps)
    places = head.to(tl.int64) * num_tokens + tokens
    tl.store(beta_ptr + places, beta, mask=live)
    tl.store(cumulated_ptr + places, cumulated, mask=live)
    tl.store(q_scale_ptr + places, q_scale, mask=live)
    tl.store(k_scale_ptr + places, k_scale, mask=live)

    row, column = i[:, None], i[None, :]
    # Masked before the exponential: for later keys it would overflow.
    lag = tl.where(row > column, cumulated[:, None] - cumulated[None, :], float("-inf"))
    L = tl.dot(k, tl.trans(k), input_precision=PRECISION) * (beta * k_scale)[:, None] * k_scale[None, :]
    L = L * tl.exp(lag)
    T = tl.where(row == column, 1.0, 0.0)
    T -= tl.where((row % 2 == 1) & (column == row - 1), L, 0.0)
    for level in tl.static_range(1, LEVELS):
        quarter = (row >> level) % 2 == 1
        M = tl.where(quarter & (column >> level == (row >> level) - 1), L, 0.0)
        T -= tl.dot(T, tl.dot(M, T, input_precision=PRECISION), input_precision=PRECISION)
    solution = solution_ptr + places[:, None] * CHUNK + column
    tl.store(solution, T.to(solution_ptr.dtype.element_ty), mask=live[:, None])


@triton_jit
def _scan_rows_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    beta_ptr,
    cumulated_ptr,
    q_scale_ptr,
    k_scale_ptr,
    solution_ptr,
    pool_ptr,
    cu_seqlens_ptr,
    read_slots_ptr,
    write_slots_ptr,
    has_initial_ptr,
    num_before_ptr,
    row_starts_ptr,
    o_ptr,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    slot_stride,
    head_stride,
    state_row_stride,
    layer_seed,
    first_head,
    num_tokens,
    num_heads,
    value_dim,
    key_dim,
    HEADS_PER_KEY_HEAD: tl.constexpr,
    ROUNDED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    GRID: tl.constexpr,
    HAS_BOUNDARIES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, blocks_v = tl.program_id(1), tl.cdiv(value_dim, BLOCK_V)
    head = tl.program_id(0) // blocks_v
    segment, next_row = segments_of_row(row_starts_ptr, row, HAS_BOUNDARIES)
    start, end = tl.load(cu_seqlens_ptr + segment), tl.load(cu_seqlens_ptr + segment + 1)
    p = tl.program_id(0) % blocks_v * BLOCK_V + tl.arange(0, BLOCK_V)
    n, i = tl.arange(0, BLOCK_K), tl.arange(0, CHUNK)
    live_p, live_n = p < value_dim, n < key_dim
    o_columns = o_ptr + head * value_dim + p
    o_stride = num_heads * value_dim
    if tl.load(write_slots_ptr + segment) == 0:  # padding: o is zero
        fill_padding_row(o_columns, o_stride, live_p, start, end, CHUNK, BLOCK_V)
        return
    if start == end:
        return

    pool = pool_ptr + head * head_stride + p[None, :] * state_row_stride + n[:, None]
    live_state = live_n[:, None] & live_p[None, :]
    S = initial_state(pool, slot_stride, live_state, read_slots_ptr, has_initial_ptr, segment)
    q_columns = q_ptr + head // HEADS_PER_KEY_HEAD * q_head_stride + n
    k_columns = k_ptr + head // HEADS_PER_KEY_HEAD * k_head_stride + n
    v_columns = v_ptr + head * v_head_stride + p
    own = head.to(tl.int64) * num_tokens
    causal = i[:, None] >= i[None, :]
    elements = p[None, :] * key_dim + n[:, None]
    for g in range(segment, next_row):
        end = tl.load(cu_seqlens_ptr + g + 1)
        num_before = tl.load(num_before_ptr + g) if ROUNDED else 0
        for first in range(start - num_before % CHUNK, end, CHUNK):
            tokens = (first + i).to(tl.int64)
            live = (tokens >= start) & (tokens < end)
            live_v, live_k = live[:, None] & live_p[None, :], live[:, None] & live_n[None, :]
            q = tl.load(q_columns[None, :] + tokens[:, None] * q_stride, mask=live_k, other=0.0)
            k = tl.load(k_columns[None, :] + tokens[:, None] * k_stride, mask=live_k, other=0.0)
            v = tl.load(v_columns[None, :] + tokens[:, None] * v_stride, mask=live_v, other=0.0)
            solution = solution_ptr + (own + tokens)[:, None] * CHUNK + i[None, :]
            T = tl.load(solution, mask=live[:, None], other=0.0)
            beta = tl.load(beta_ptr + own + tokens, mask=live, other=0.0)
            decay = tl.load(cumulated_ptr + own + tokens, mask=live, other=0.0)
            q_scale = tl.load(q_scale_ptr + own + tokens, mask=live, other=0.0)
            k_scale = tl.load(k_scale_ptr + own + tokens, mask=live, other=0.0)
            total = tl.load(cumulated_ptr + own + tl.minimum(first + CHUNK, end) - 1)
            before = S.to(k.dtype)
            told = tl.dot(k, before, input_precision=PRECISION) * (k_scale * tl.exp(decay))[:, None]
            error = (beta[:, None] * (v.to(tl.float32) - told)).to(k.dtype)
            U = tl.dot(T, error, input_precision=PRECISION)
            # Masked before the exponential: for later keys, and for tokens after the end, it would overflow.
            lag = tl.where(causal & live[:, None], decay[:, None] - decay[None, :], float("-inf"))
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * tl.exp(lag)
            scores = scores * q_scale[:, None] * k_scale[None, :]
            o = tl.dot(q, before, input_precision=PRECISION) * (q_scale * tl.exp(decay))[:, None]
            o = tl.dot(scores.to(k.dtype), U.to(k.dtype), acc=o, input_precision=PRECISION)
            o_tile = o_columns[None, :] + tokens[:, None] * o_stride
            tl.store(o_tile, o.to(o_ptr.dtype.element_ty), mask=live_v)
            weight = tl.where(live, k_scale * tl.exp(total - decay), 0.0)
            written = (U * weight[:, None]).to(k.dtype)
            S = tl.dot(tl.trans(k), written, acc=S * tl.exp(total), input_precision=PRECISION)
            if ROUNDED:
                position = num_before + tl.minimum(first + CHUNK, end) - start
                S = round_behind_chunk(
                    S, pool, elements, layer_seed, head + first_head, position, first + CHUNK >= end,
                    STOCHASTIC, GRID,
                )  # fmt: skip
        target = tl.load(write_slots_ptr + g).to(tl.int64)
        tl.store(pool + target * slot_stride, S.to(pool_ptr.dtype.element_ty), mask=live_state)
        start = end


@functools.cache
def tile_request(dtype: torch.dtype, value_dim: int, key_dim: int) -> TileRequest:
    """Request narrow tiles: with 32 value heads of 128 channels, 128 programs scan one prompt in parallel."""
    exact, block_v = dtype == torch.float32, max(16, triton.next_power_of_2(value_dim))
    few_warps = bool(key_dim % 8 or value_dim % 8)
    return TileRequest.of(
        "gated_delta_chunk",
        {
            "CHUNK": 16 if exact else CHUNK_TOKENS,
            "BLOCK_V": min(block_v, 32),
            # From four warps on, products are wgmma. With Triton 3.6 on an H200 they were wrong for rows that
            # are not loaded in 16-byte vectors: the outputs of all warps but the first.
            "num_warps": 2 if few_warps else 8 if exact else 4,
            "num_stages": 1 if exact else 2,
        },
        dtype=dtype,
        value_dim=value_dim,
        key_dim=key_dim,
    )


def _launch(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A: Tensor, dt_bias: Tensor, state: Tensor,
    segments: Segments, rounding: StateRounding = NEAREST,
) -> Tensor:  # fmt: skip
    num_tokens, num_heads, value_dim = v.shape
    num_key_heads, key_dim = k.shape[1:]
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if 0 in (segments.num_rows, num_tokens, segments.max_seq_len):
        return o
    tiles = dict(choose(tile_request(v.dtype, value_dim, key_dim), v.device))
    chunk, num_chunks, rows, places, flags = scan_launch(state, segments, rounding, tiles.pop("CHUNK"))
    of_tokens = torch.empty((4, num_heads, num_tokens), dtype=torch.float32, device=v.device)
    solution = torch.empty((num_heads, num_tokens, chunk), dtype=v.dtype, device=v.device)
    sizes = {
        "HEADS_PER_KEY_HEAD": num_heads // num_key_heads,
        "CHUNK": chunk,
        "BLOCK_K": max(16, triton.next_power_of_2(key_dim)),
        "PRECISION": "tf32x3" if v.dtype == torch.float32 else "tf32",
    }
    _solve_chunks_kernel[(num_heads, num_chunks, len(segments.write_slots))](
        q, k, a, b, A, dt_bias, segments.cu_seqlens, segments.num_before, *of_tokens, solution,
        *q.stride()[:2], *k.stride()[:2], a.stride(0), b.stride(0), key_dim**-0.5, NORM_EPS,
        num_tokens, key_dim, LEVELS=chunk.bit_length() - 1, ROUNDED=flags["ROUNDED"], **sizes,
    )  # fmt: skip
    _scan_rows_kernel[(num_heads * triton.cdiv(value_dim, tiles["BLOCK_V"]), segments.num_rows)](
        q, k, v, *of_tokens, solution, *rows, o,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *places, num_tokens, num_heads, value_dim, key_dim,
        **flags, **sizes, **tiles,
    )  # fmt: skip
    return o


def _scan_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A: Tensor, dt_bias: Tensor, state: Tensor,
    segments: Segments, rounding: StateRounding,
) -> Tensor:  # fmt: skip
    num_tokens, num_heads, value_dim = v.shape
    num_key_heads, key_dim = k.shape[1:]
    decay, beta = torch.empty(2, num_heads, num_tokens).unbind()
    scan_gates.parallel_for(
        num_heads,
        1 + _GRAIN_GATES // (1 + num_tokens),
        *(t.float() for t in (a, b, A, dt_bias)),
        decay,
        beta,
    )
    o = torch.empty(v.shape)
    scan_heads.parallel_for(
        num_heads,
        1 + _GRAIN_ELEMENTS // (1 + num_tokens * value_dim * key_dim),
        *flat_rows(q, k, v),
        decay,
        beta,
        np.float32(key_dim**-0.5),
        num_key_heads,
        key_dim,
        value_dim,
        *scan_states(state, segments, rounding),
        FlatArray(o),
    )
    return o.to(v.dtype)


_GRAIN_ELEMENTS = 2**21  # tokens times elements of state, about 100 µs
_GRAIN_GATES = 2**12  # tokens times heads, about 100 µs


def gated_delta_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    has_initial: Tensor,
    *,
    max_seq_len: int,
    boundaries: Boundaries | None = None,
    num_before: Tensor | None = None,
    rounding: StateRounding = NEAREST,
) -> Tensor:
    """Scan the ragged rows of a prefill batch and store each row's last state in its write slot.

    q and k ``[num_tokens, Hk, Dk]``, v ``[num_tokens, Hv, Dv]``, a and b ``[num_tokens, Hv]``, A (below 0)
    and dt_bias ``[Hv]``, state ``[num_slots, Hv, Dv, Dk]``; with S rows, cu_seqlens ``[S + 1]``, read_slots,
    write_slots and has_initial ``[S]``. Row s starts from ``read_slots[s]`` if ``has_initial[s]``, else from
    zeros.
    A row may write the slot that it reads, but no slot that another row reads. The states at ``boundaries``
    are stored as well. The pool is float32, or bfloat16 rounded by ``rounding``; bfloat16 needs num_before
    ``[S]`` int32, each row's number of tokens before this batch. Returns o ``[num_tokens, Hv, Dv]``, zero in
    padding rows (write slot 0).
    """
    assert num_before is not None or state.dtype != torch.bfloat16
    operands = q, k, v, a, b, A, dt_bias, state
    rows = cu_seqlens, read_slots, write_slots, has_initial
    if v.dtype == torch.float64:
        return gated_delta_chunk_reference(
            *operands, *rows, boundaries=boundaries, num_before=num_before, rounding=rounding
        )
    run = _launch if v.is_cuda else _scan_on_cpu
    return run(*operands, segments_of(boundaries, rows, num_before, max_seq_len), rounding)
