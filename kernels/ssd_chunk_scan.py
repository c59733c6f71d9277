"""Prefill of a Mamba-2 layer: the SSM recurrence over ragged rows, by chunks.

    dt' = clamp(softplus(dt + dt_bias), *dt_limit)
    h_t = exp(A dt') h_{t-1} + dt' x_t B_t^T                    [P, N] a head
    y_t = h_t C_t + D x_t

Head h uses B and C of group ``h // (H // G)``.

| device | form |
|---|---|
| CUDA | chunks of ``chunk_size`` tokens, their work as GEMMs (Triton) |
| CPU | the recurrence itself, in registers: faster there (kernels/ssd_scan_cpu.py) |
| float64 anywhere | reference |
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from kernels.boundaries import Boundaries, stores_by_row
from kernels.cpu_jit import as_array, as_flat_array
from kernels.ssd_scan_cpu import scan_heads
from kernels.staged_slots import StagedSlots
from kernels.time_step import time_step
from kernels.triton_jit import tl, triton, triton_jit


def ssd_chunk_scan_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    has_initial: torch.Tensor,
    *,
    dt_limit: tuple[float, float],
    boundaries: Boundaries | None = None,
) -> torch.Tensor:
    """:func:`ssd_chunk_scan` as the plain recurrence, one token after the other."""
    acc = torch.promote_types(x.dtype, torch.float32)
    heads_per_group = x.shape[1] // B.shape[1]
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    bounds = cu_seqlens.tolist()
    stores = stores_by_row(boundaries, len(write_slots))
    rows = zip(read_slots.tolist(), write_slots.tolist(), has_initial.tolist(), stores, strict=True)
    for start, end, (source, target, initial, inner) in zip(bounds, bounds[1:], rows, strict=False):
        if target == 0 or start == end:
            continue
        h = ssm_state[source].to(acc) if initial else torch.zeros_like(ssm_state[target], dtype=acc)
        step = F.softplus(dt[start:end].to(acc) + dt_bias.to(acc)).clamp(*dt_limit)
        decay = torch.exp(A.to(acc) * step)
        B_row, C_row = (t[start:end].to(acc).repeat_interleave(heads_per_group, dim=1) for t in (B, C))
        x_row = x[start:end].to(acc)
        for i in range(end - start):
            h = decay[i, :, None, None] * h + (step[i, :, None] * x_row[i])[:, :, None] * B_row[i, :, None, :]
            y[start + i] = (h * C_row[i, :, None, :]).sum(dim=-1) + D.to(acc)[:, None] * x_row[i]
            if i + 1 in inner:
                ssm_state[inner[i + 1]] = h
        ssm_state[target] = h
    return y


# Four stages, after "Transformers are SSMs" (Dao and Gu, 2024), section 6:
#
#   | stage                                              | one program a                     |
#   |----------------------------------------------------|-----------------------------------|
#   | step, and the running sum of A * step in a chunk   | chunk, BLOCK_H heads              |
#   | a chunk's own contribution to the state: GEMM      | chunk, head, [BLOCK_P, BLOCK_N]   |
#   | from those the states before each chunk, in order, | row, head, BLOCK elements         |
#   | and the states to keep                             |                                   |
#   | outputs: the state before the chunk, and causal    | BLOCK_Q tokens, head, BLOCK_P     |
#   | scores within it as in flash attention: GEMMs      |                                   |
#
# GEMMs take the inputs' dtype and accumulate in float32; float32 goes in as three TF32 terms, since one would
# keep 10 bits. C B^T is one for all heads of a group and yet computed for each: from cache, on tensor cores
# that wait for memory anyway, that costs less than to write a [Q, Q] matrix and read it back.
#
# A state can be kept only where a chunk ends, so chunks are counted from the last boundary: all but the third
# stage run over segments (boundaries.py) as though they were rows, and the third passes a row's state through
# its segments. A boundary thus costs at most one chunk more, filled in part. Chunk c of segment g has
# workspace entry cu_seqlens[g] // Q + g + c: distinct, and known without a sync.


@triton_jit
def _chunk_of_program(cu_seqlens_ptr, write_slots_ptr, CHUNK: tl.constexpr, PARTS: tl.constexpr):
    """Workspace entry, first token and number of tokens of axis 0's and 1's (part of a chunk, segment)."""
    segment = tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + segment).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + segment + 1).to(tl.int64)
    end = tl.where(tl.load(write_slots_ptr + segment) == 0, start, end)  # padding has no tokens
    c = tl.program_id(0) // PARTS
    first = start + c * CHUNK
    return start // CHUNK + segment + c, first, tl.minimum(end - first, CHUNK)


@triton_jit
def _cumulate_decay_kernel(
    dt_ptr,
    A_ptr,
    dt_bias_ptr,
    cu_seqlens_ptr,
    write_slots_ptr,
    step_ptr,
    cumulated_ptr,
    dt_stride,
    dt_min,
    dt_max,
    num_tokens,
    num_heads,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    _, first, length = _chunk_of_program(cu_seqlens_ptr, write_slots_ptr, CHUNK, 1)
    if length <= 0:
        return
    heads = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    live_heads = heads < num_heads
    A = tl.load(A_ptr + heads, mask=live_heads, other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + heads, mask=live_heads, other=0.0).to(tl.float32)
    tokens = tl.arange(0, CHUNK)
    live = (tokens < length)[:, None] & live_heads[None, :]
    dt_tile = dt_ptr + (first + tokens)[:, None] * dt_stride + heads[None, :]
    step = tl.load(dt_tile, mask=live, other=0.0).to(tl.float32) + dt_bias[None, :]
    step = time_step(step, dt_min, dt_max)
    tile = heads[None, :].to(tl.int64) * num_tokens + (first + tokens)[:, None]
    tl.store(step_ptr + tile, step, mask=live)
    tl.store(cumulated_ptr + tile, tl.cumsum(A[None, :] * step, axis=0), mask=live)


@triton_jit
def _chunk_states_kernel(
    x_ptr,
    B_ptr,
    step_ptr,
    cumulated_ptr,
    cu_seqlens_ptr,
    write_slots_ptr,
    states_ptr,
    x_stride,
    x_head_stride,
    B_stride,
    B_group_stride,
    num_tokens,
    num_heads,
    head_dim,
    state_dim,
    HEADS_PER_GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    entry, first, length = _chunk_of_program(cu_seqlens_ptr, write_slots_ptr, CHUNK, 1)
    if length <= 0:
        return
    blocks_p, blocks_n = tl.cdiv(head_dim, BLOCK_P), tl.cdiv(state_dim, BLOCK_N)
    head = tl.program_id(2) // (blocks_p * blocks_n)
    p = tl.program_id(2) // blocks_n % blocks_p * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.program_id(2) % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    live_p, live_n = p < head_dim, n < state_dim
    head_tokens = head.to(tl.int64) * num_tokens + first
    total = tl.load(cumulated_ptr + head_tokens + length - 1)
    x_chunk = x_ptr + first * x_stride + head * x_head_stride + p[:, None]
    B_chunk = B_ptr + first * B_stride + head // HEADS_PER_GROUP * B_group_stride + n[None, :]
    state = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for t in range(0, length, BLOCK_T):
        tokens = t + tl.arange(0, BLOCK_T)
        live = tokens < length
        step = tl.load(step_ptr + head_tokens + tokens, mask=live, other=0.0)
        cumulated = tl.load(cumulated_ptr + head_tokens + tokens, mask=live, other=0.0)
        weight = tl.where(live, step * tl.exp(total - cumulated), 0.0)
        x = tl.load(x_chunk + tokens[None, :] * x_stride, mask=live_p[:, None] & live[None, :], other=0.0)
        B = tl.load(B_chunk + tokens[:, None] * B_stride, mask=live[:, None] & live_n[None, :], other=0.0)
        weighted = (x * weight[None, :]).to(B.dtype)
        state = tl.dot(weighted, B, acc=state, input_precision=PRECISION)
    tile = (entry * num_heads + head) * head_dim * state_dim + p[:, None] * state_dim + n[None, :]
    tl.store(states_ptr + tile, state, mask=live_p[:, None] & live_n[None, :])


@triton_jit
def _pass_states_kernel(
    states_ptr,
    cumulated_ptr,
    pool_ptr,
    cu_seqlens_ptr,
    read_slots_ptr,
    write_slots_ptr,
    has_initial_ptr,
    row_starts_ptr,
    slot_stride,
    head_stride,
    state_row_stride,
    num_tokens,
    num_heads,
    head_dim,
    state_dim,
    HAS_BOUNDARIES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    segment, next_row = row, row + 1
    if HAS_BOUNDARIES:
        segment, next_row = tl.load(row_starts_ptr + row), tl.load(row_starts_ptr + row + 1)
    start = tl.load(cu_seqlens_ptr + segment).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + segment + 1).to(tl.int64)
    if (tl.load(write_slots_ptr + segment) == 0) | (start == end):
        return
    elements = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    live = elements < head_dim * state_dim
    pool = pool_ptr + head * head_stride + elements // state_dim * state_row_stride + elements % state_dim
    h = tl.zeros((BLOCK,), tl.float32)
    if tl.load(has_initial_ptr + segment) != 0:
        source = tl.load(read_slots_ptr + segment).to(tl.int64)
        h += tl.load(pool + source * slot_stride, mask=live, other=0.0).to(tl.float32)
    cumulated = cumulated_ptr + head.to(tl.int64) * num_tokens
    for g in range(segment, next_row):
        end = tl.load(cu_seqlens_ptr + g + 1).to(tl.int64)
        states = states_ptr + ((start // CHUNK + g) * num_heads + head) * head_dim * state_dim + elements
        for first in range(start, end, CHUNK):
            contribution = tl.load(states, mask=live, other=0.0)
            tl.store(states, h, mask=live)
            h = h * tl.exp(tl.load(cumulated + tl.minimum(first + CHUNK, end) - 1)) + contribution
            states += num_heads * head_dim * state_dim
        target = tl.load(write_slots_ptr + g).to(tl.int64)
        tl.store(pool + target * slot_stride, h.to(pool_ptr.dtype.element_ty), mask=live)
        start = end


@triton_jit
def _chunk_outputs_kernel(
    x_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    step_ptr,
    cumulated_ptr,
    cu_seqlens_ptr,
    write_slots_ptr,
    states_ptr,
    y_ptr,
    x_stride,
    x_head_stride,
    B_stride,
    B_group_stride,
    C_stride,
    C_group_stride,
    num_tokens,
    num_heads,
    head_dim,
    state_dim,
    HEADS_PER_GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    PARTS: tl.constexpr = CHUNK // BLOCK_Q
    entry, first, length = _chunk_of_program(cu_seqlens_ptr, write_slots_ptr, CHUNK, PARTS)
    query = tl.program_id(0) % PARTS * BLOCK_Q
    if query >= length:
        return
    blocks_p = tl.cdiv(head_dim, BLOCK_P)
    head = tl.program_id(2) // blocks_p
    p = tl.program_id(2) % blocks_p * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    live_p, live_n = p < head_dim, n < state_dim
    queries = query + tl.arange(0, BLOCK_Q)
    live_q = queries < length
    group = head // HEADS_PER_GROUP
    head_tokens = head.to(tl.int64) * num_tokens + first
    x_chunk = x_ptr + first * x_stride + head * x_head_stride + p[None, :]
    B_chunk = B_ptr + first * B_stride + group * B_group_stride + n[:, None]
    C_tile = C_ptr + first * C_stride + group * C_group_stride + queries[:, None] * C_stride + n[None, :]
    C = tl.load(C_tile, mask=live_q[:, None] & live_n[None, :], other=0.0)
    cumulated_q = tl.load(cumulated_ptr + head_tokens + queries, mask=live_q, other=0.0)

    # What came before the chunk.
    h_tile = (entry * num_heads + head) * head_dim * state_dim + p[None, :] * state_dim + n[:, None]
    h = tl.load(states_ptr + h_tile, mask=live_p[None, :] & live_n[:, None], other=0.0)
    y = tl.dot(C, h.to(C.dtype), input_precision=PRECISION) * tl.exp(cumulated_q)[:, None]

    for key in range(0, query + BLOCK_Q, BLOCK_Q):
        keys = key + tl.arange(0, BLOCK_Q)
        live_k = keys < length
        B = tl.load(B_chunk + keys[None, :] * B_stride, mask=live_n[:, None] & live_k[None, :], other=0.0)
        x = tl.load(x_chunk + keys[:, None] * x_stride, mask=live_k[:, None] & live_p[None, :], other=0.0)
        step = tl.load(step_ptr + head_tokens + keys, mask=live_k, other=0.0)
        cumulated = tl.load(cumulated_ptr + head_tokens + keys, mask=live_k, other=0.0)
        scores = tl.dot(C, B, input_precision=PRECISION)
        # Masked before the exponential: a later key's would overflow.
        causal = (queries[:, None] >= keys[None, :]) & live_q[:, None] & live_k[None, :]
        decay = tl.exp(tl.where(causal, cumulated_q[:, None] - cumulated[None, :], float("-inf")))
        scores = scores * decay * step[None, :]
        y = tl.dot(scores.to(x.dtype), x, acc=y, input_precision=PRECISION)

    live = live_q[:, None] & live_p[None, :]
    x = tl.load(x_chunk + queries[:, None] * x_stride, mask=live, other=0.0).to(tl.float32)
    y += tl.load(D_ptr + head).to(tl.float32) * x
    y_tile = y_ptr + ((first + queries)[:, None] * num_heads + head) * head_dim + p[None, :]
    tl.store(y_tile, y.to(y_ptr.dtype.element_ty), mask=live)


def _launch(
    x, dt, A, B, C, D, dt_bias, ssm_state, cu_seqlens, read_slots, write_slots, has_initial,
    chunk_size, dt_limit, max_seq_len, boundaries,
):  # fmt: skip
    num_tokens, num_heads, head_dim = x.shape
    num_groups, state_dim = B.shape[1:]
    num_rows = len(write_slots)
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if 0 in (num_rows, num_tokens, max_seq_len):
        return y
    row_starts = None
    if boundaries is not None:
        cut = boundaries.segments
        cu_seqlens, read_slots, write_slots, has_initial = cut.as_rows()
        row_starts, max_seq_len = cut.row_starts, cut.max_seq_len
    num_segments = len(write_slots)
    chunk = max(16, triton.next_power_of_2(chunk_size))
    num_chunks = triton.cdiv(max_seq_len, chunk)
    # Three TF32 terms take three times the registers: these blocks keep float32 from spilling on sm_90.
    block_t, block_q = (32, 16) if x.dtype == torch.float32 else (64, 64)
    block_t, block_q = min(chunk, block_t), min(chunk, block_q)
    block_h = min(triton.next_power_of_2(num_heads), 16)
    block_p = min(max(16, triton.next_power_of_2(head_dim)), 64)
    block_n = max(16, triton.next_power_of_2(state_dim))
    state_block_n = min(block_n, 128)
    head_major = {"dtype": torch.float32, "device": x.device}
    step, cumulated = torch.empty((2, num_heads, num_tokens), **head_major)
    states = torch.empty((num_tokens // chunk + num_segments, num_heads, head_dim, state_dim), **head_major)
    segments = (cu_seqlens, write_slots)
    sizes = (num_tokens, num_heads, head_dim, state_dim)
    tiles = {
        "HEADS_PER_GROUP": num_heads // num_groups,
        "CHUNK": chunk,
        "BLOCK_P": block_p,
        "PRECISION": "tf32x3" if x.dtype == torch.float32 else "tf32",  # other dtypes don't look at it
    }
    _cumulate_decay_kernel[(num_chunks, num_segments, triton.cdiv(num_heads, block_h))](
        dt, A, dt_bias, *segments, step, cumulated, dt.stride(0), *dt_limit, num_tokens, num_heads,
        CHUNK=chunk, BLOCK_H=block_h,
    )  # fmt: skip
    tiles_of_state = triton.cdiv(head_dim, block_p) * triton.cdiv(state_dim, state_block_n)
    _chunk_states_kernel[(num_chunks, num_segments, num_heads * tiles_of_state)](
        x, B, step, cumulated, *segments, states, *x.stride()[:2], *B.stride()[:2], *sizes,
        BLOCK_T=block_t, BLOCK_N=state_block_n, **tiles,
    )  # fmt: skip
    block = 1024
    _pass_states_kernel[(num_rows, num_heads, triton.cdiv(head_dim * state_dim, block))](
        states, cumulated, ssm_state, cu_seqlens, read_slots, write_slots, has_initial.view(torch.uint8),
        row_starts, *ssm_state.stride()[:3], *sizes,
        HAS_BOUNDARIES=row_starts is not None, CHUNK=chunk, BLOCK=block,
    )  # fmt: skip
    grid = (num_chunks * (chunk // block_q), num_segments, num_heads * triton.cdiv(head_dim, block_p))
    _chunk_outputs_kernel[grid](
        x, B, C, D, step, cumulated, *segments, states, y,
        *x.stride()[:2], *B.stride()[:2], *C.stride()[:2], *sizes,
        BLOCK_Q=block_q, BLOCK_N=block_n, num_stages=3 if block_n <= 128 else 2, **tiles,
    )  # fmt: skip
    return y


def _ssd_chunk_scan_cpu(
    x, dt, A, B, C, D, dt_bias, ssm_state, cu_seqlens, read_slots, write_slots, has_initial, dt_limit
):
    if ssm_state.dtype != torch.float32:
        write_slots = torch.where(cu_seqlens.diff() > 0, write_slots, 0)
        read_slots = torch.where(has_initial & (write_slots != 0), read_slots, 0)
        staged = StagedSlots.gather(ssm_state, read_slots, write_slots)
        slots = staged.read_slots, staged.write_slots
        y = _ssd_chunk_scan_cpu(
            x, dt, A, B, C, D, dt_bias, staged.pool, cu_seqlens, *slots, has_initial, dt_limit
        )
        staged.scatter(ssm_state, write_slots)
        return y
    num_tokens, num_heads, head_dim = x.shape
    num_groups, state_dim = B.shape[1:]
    step = F.softplus(dt.float() + dt_bias.float()).clamp_(*dt_limit).T.contiguous()
    y = torch.zeros(x.shape)
    strided = [(as_flat_array(t), *t.stride()[:2]) for t in (x.float(), B.float(), C.float())]
    scan_heads.parallel_for(
        num_heads,
        1 + _GRAIN_ELEMENTS // (1 + num_tokens * head_dim * state_dim),
        *itertools.chain.from_iterable(strided),
        as_array(step),
        as_array(torch.exp(step * A.float()[:, None])),
        as_array(D.float()),
        num_groups,
        head_dim,
        state_dim,
        as_flat_array(ssm_state),
        *ssm_state.stride()[:3],
        as_array(cu_seqlens.contiguous()),
        as_array(read_slots.contiguous()),
        as_array(write_slots.contiguous()),
        as_array(has_initial.contiguous()),
        as_array(y.view(-1)),
    )
    return y.to(x.dtype)


_GRAIN_ELEMENTS = 2**21  # tokens times elements of state, about 100 µs


def ssd_chunk_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    has_initial: torch.Tensor,
    *,
    chunk_size: int,
    dt_limit: tuple[float, float],
    max_seq_len: int,
    boundaries: Boundaries | None = None,
) -> torch.Tensor:
    """Scan the ragged rows of a prefill batch and leave each row's last state in its write slot.

    x ``[num_tokens, H, P]``, dt ``[num_tokens, H]``, A, D and dt_bias ``[H]``, B and C
    ``[num_tokens, G, N]``, ssm_state ``[num_slots, H, P, N]``, cu_seqlens ``[S + 1]``, read_slots,
    write_slots and has_initial ``[S]``. Row s starts from ``read_slots[s]`` where ``has_initial[s]``, else
    from zeros. It may write the slot that it reads, but none that another row reads. The states at
    ``boundaries`` are stored as well. Returns y ``[num_tokens, H, P]``; zero in padding rows (write slot 0).
    """
    operands = (x, dt, A, B, C, D, dt_bias, ssm_state)
    rows = (cu_seqlens, read_slots, write_slots, has_initial)
    if x.dtype == torch.float64:
        return ssd_chunk_scan_reference(*operands, *rows, dt_limit=dt_limit, boundaries=boundaries)
    if x.is_cuda:
        return _launch(*operands, *rows, chunk_size, dt_limit, max_seq_len, boundaries)
    if boundaries is not None:
        rows = boundaries.segments.as_rows()
    return _ssd_chunk_scan_cpu(*operands, *rows, dt_limit)
