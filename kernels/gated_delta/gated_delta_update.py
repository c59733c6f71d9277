"""One decode step of a Gated DeltaNet layer (arXiv:2412.06464): its recurrence over a row's ``T`` positions.

    g    = A softplus(a + dt_bias),   beta = sigmoid(b)
    k'   = k / sqrt(sum k^2 + 1e-6),  q' = q / sqrt(sum q^2 + 1e-6) / sqrt(Dk)
    S_t  = exp(g) S_{t-1}
    S_t += beta (v_t - S_t k'_t) k'_t^T                         [Dv, Dk] per value head
    o_t  = S_t q'_t

Hk and Hv are the numbers of key and value heads, Dk and Dv their channels. Value head h uses q and k of key
head ``h // (Hv // Hk)``. A state's rows are value channels, which don't depend on each other. Its columns are
key channels, contiguous in memory. So ``S k'`` and ``S q'`` are sums along a row. Tensor parallelism divides
the heads among ranks. (transformers and fla keep the transpose of S.)

With k drafts, a decode row has ``T = 1 + k`` positions. The state after each position goes to its own slot,
so that the next step may start after any accepted prefix. A state of 16 bits is rounded after every position
(kernels/formats/stochastic_round.py), and the next position starts from the rounded state.
kernels/replay/gated_delta_replay.py has another form of this step, with one slot per row.

| device | form |
|---|---|
| CUDA | Triton |
| CPU | numba, in place (kernels/gated_delta/gated_delta_update_cpu.py) |
| any, in float64 | reference |
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.jit import FlatArray
from kernels.formats.stochastic_round import NEAREST, StateRounding
from kernels.gated_delta.gated_delta_update_cpu import NORM_EPS, update_heads
from kernels.gpu.tiles import TileRequest, choose
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.ssm.reference_row import ReferenceRow, reference_decode_rows
from kernels.ssm.scan_row import fill_padding_positions, leave_position, time_step
from kernels.ssm.state_arguments import decode_states, flat_rows


def gated_delta_update_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    *,
    seq_lens: Tensor | None = None,
    rounding: StateRounding = NEAREST,
) -> Tensor:
    """Reference of :func:`gated_delta_update`, one row and one position after the other."""
    rows = reference_decode_rows(read_slots, write_slots, seq_lens)
    q, k, v_tokens, a, b = (t.flatten(0, 1) for t in (q, k, v, a, b))
    return reference_scan(rows, q, k, v_tokens, a, b, A, dt_bias, state, rounding).view(v.shape)


def reference_scan(
    rows: Iterable[ReferenceRow], q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A: Tensor,
    dt_bias: Tensor, state: Tensor, rounding: StateRounding,
) -> Tensor:  # fmt: skip
    """Return outputs ``[num_tokens, Hv, Dv]`` of rows whose tokens are contiguous in q, k, v, a and b."""
    acc = torch.promote_types(q.dtype, torch.float32)
    o = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    for row in rows:
        inputs = (t[row.tokens].to(acc) for t in (q, k, v, a, b))
        row.scan(reference_step, reference_tokens(inputs, A.to(acc), dt_bias.to(acc)), state, o, rounding)
    return o


def reference_tokens(inputs: Iterable[Tensor], A: Tensor, dt_bias: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield ``(q', k', v, exp(g), beta)`` of each token, q' and k' ``[Hv, Dk]``, from inputs of n tokens."""
    q, k, v, a, b = inputs
    decay, beta = torch.exp(A * F.softplus(a + dt_bias)), torch.sigmoid(b)
    q, k = (t * torch.rsqrt(t.square().sum(dim=-1, keepdim=True) + NORM_EPS) for t in (q, k))
    q, k = (t.repeat_interleave(v.shape[1] // q.shape[1], dim=1) for t in (q * q.shape[-1] ** -0.5, k))
    return zip(q, k, v, decay, beta, strict=True)


def reference_step(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the next state ``[Hv, Dv, Dk]`` and the output ``[Hv, Dv]``."""
    S = decay[:, None, None] * S
    error = v - (S * k[:, None, :]).sum(dim=-1)
    S = S + (beta[:, None] * error)[:, :, None] * k[:, None, :]
    return S, (S * q[:, None, :]).sum(dim=-1)


@triton_jit
def advance_tile(S, k, v, decay, beta):
    """Return the state's tile ``[BLOCK_V, BLOCK_K]`` after a token, whose k is normalized, in every form of
    the decode step."""
    S *= decay
    error = v - tl.sum(S * k[None, :], axis=1)
    return S + (beta * error)[:, None] * k[None, :]


# One program per (row, value head, BLOCK_V rows of the state): its [BLOCK_V, Dk] tile stays in registers over
# all positions, so that the state is read once, and written once per position. This traffic limits the speed
# of the step. Therefore neighbouring programs on axis 0 take neighbouring tiles of a slot. A position's small
# operands are requested before the previous position is computed. Those of the first position are requested
# while the load of the slot's number is still under way.
@triton_jit
def _update_tiles_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    A_ptr,
    dt_bias_ptr,
    state_ptr,
    read_slots_ptr,
    write_slots_ptr,
    seq_lens_ptr,
    o_ptr,
    q_row_stride,
    q_position_stride,
    q_head_stride,
    k_row_stride,
    k_position_stride,
    k_head_stride,
    v_row_stride,
    v_position_stride,
    v_head_stride,
    a_row_stride,
    a_position_stride,
    b_row_stride,
    b_position_stride,
    slot_stride,
    head_stride,
    state_row_stride,
    scale,
    norm_eps,
    layer_seed,
    first_head,
    num_heads,
    value_dim,
    key_dim,
    HEADS_PER_KEY_HEAD: tl.constexpr,
    NUM_POSITIONS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row, blocks_v = tl.program_id(1).to(tl.int64), tl.cdiv(value_dim, BLOCK_V)
    head = tl.program_id(0) // blocks_v
    slot = tl.load(read_slots_ptr + row).to(tl.int64)
    rows = tl.program_id(0) % blocks_v * BLOCK_V + tl.arange(0, BLOCK_V)
    columns = tl.arange(0, BLOCK_K)
    live_v, live_k = rows < value_dim, columns < key_dim
    live = live_v[:, None] & live_k[None, :]
    q_row = q_ptr + row * q_row_stride + head // HEADS_PER_KEY_HEAD * q_head_stride + columns
    k_row = k_ptr + row * k_row_stride + head // HEADS_PER_KEY_HEAD * k_head_stride + columns
    v_row = v_ptr + row * v_row_stride + head * v_head_stride + rows
    a_row, b_row = a_ptr + row * a_row_stride + head, b_ptr + row * b_row_stride + head
    o_row = o_ptr + (row * NUM_POSITIONS * num_heads + head) * value_dim + rows
    q = tl.load(q_row, mask=live_k, other=0.0)
    k = tl.load(k_row, mask=live_k, other=0.0)
    v = tl.load(v_row, mask=live_v, other=0.0)
    a, b = tl.load(a_row), tl.load(b_row)
    A = tl.load(A_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    if slot == 0:  # padding: o is zero
        fill_padding_positions(o_row, num_heads * value_dim, live_v, NUM_POSITIONS, BLOCK_V)
        return
    state_tile = state_ptr + head * head_stride + rows[:, None] * state_row_stride + columns[None, :]
    S = tl.load(state_tile + slot * slot_stride, mask=live, other=0.0).to(tl.float32)
    for i in tl.static_range(NUM_POSITIONS):
        q_i, k_i, v_i = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
        a_i, beta = a.to(tl.float32), tl.sigmoid(b.to(tl.float32))
        if i + 1 < NUM_POSITIONS:
            q = tl.load(q_row + (i + 1) * q_position_stride, mask=live_k, other=0.0)
            k = tl.load(k_row + (i + 1) * k_position_stride, mask=live_k, other=0.0)
            v = tl.load(v_row + (i + 1) * v_position_stride, mask=live_v, other=0.0)
            a = tl.load(a_row + (i + 1) * a_position_stride)
            b = tl.load(b_row + (i + 1) * b_position_stride)
        q_i *= scale / tl.sqrt(tl.sum(q_i * q_i, axis=0) + norm_eps)
        k_i *= 1.0 / tl.sqrt(tl.sum(k_i * k_i, axis=0) + norm_eps)
        S = advance_tile(S, k_i, v_i, tl.exp(A * time_step(a_i + dt_bias, 0.0, float("inf"))), beta)
        o = tl.sum(S * q_i[None, :], axis=1)
        tl.store(o_row + i * num_heads * value_dim, o.to(o_ptr.dtype.element_ty), mask=live_v)
        elements = rows[:, None] * key_dim + columns[None, :]
        S = leave_position(
            S, state_tile, slot_stride, live, elements, write_slots_ptr, seq_lens_ptr, row, i, layer_seed,
            head + first_head, NUM_POSITIONS, STOCHASTIC,
        )  # fmt: skip


@functools.cache
def tile_request(dtype: torch.dtype, state_dtype: torch.dtype, value_dim: int, key_dim: int) -> TileRequest:
    """Request tiles of 2,048 state elements, so that a thread has 16 elements in flight, and a batch of one
    row has 2 programs per SM (32 heads of 128 × 128 on an H100)."""
    block_v = min(triton.next_power_of_2(value_dim), max(1, 2048 // triton.next_power_of_2(key_dim)))
    return TileRequest.of(
        "gated_delta_update",
        {"BLOCK_V": block_v, "num_warps": 4},
        dtype=dtype,
        state_dtype=state_dtype,
        value_dim=value_dim,
        key_dim=key_dim,
    )


@functools.cache
def replay_tile_request(
    dtype: torch.dtype, state_dtype: torch.dtype, value_dim: int, key_dim: int
) -> TileRequest:
    """Request tiles of 4,096 state elements, 32 for a thread, as in Mamba's replay.

    One warp would be faster, but sums of q and k, which warps share, would get another order than in
    :func:`tile_request`'s programs.
    """
    block_v = min(triton.next_power_of_2(value_dim), max(1, 4096 // triton.next_power_of_2(key_dim)))
    return TileRequest.of(
        "gated_delta_replay",
        {"BLOCK_V": block_v, "num_warps": 4},
        dtype=dtype,
        state_dtype=state_dtype,
        value_dim=value_dim,
        key_dim=key_dim,
    )


def _launch(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A: Tensor, dt_bias: Tensor, state: Tensor,
    read_slots: Tensor, write_slots: Tensor, seq_lens: Tensor | None = None,
    rounding: StateRounding = NEAREST,
) -> Tensor:  # fmt: skip
    num_rows, num_positions, num_heads, value_dim = v.shape
    num_key_heads, key_dim = k.shape[2:]
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if num_rows == 0:
        return o
    tiles = choose(tile_request(v.dtype, state.dtype, value_dim, key_dim), v.device)
    _update_tiles_kernel[(num_heads * triton.cdiv(value_dim, tiles["BLOCK_V"]), num_rows)](
        q, k, v, a, b, A, dt_bias, state, read_slots, write_slots.contiguous(), seq_lens, o,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *a.stride()[:2], *b.stride()[:2],
        *state.stride()[:3], key_dim**-0.5, NORM_EPS, rounding.signed_seed, rounding.first_head, num_heads,
        value_dim, key_dim, HEADS_PER_KEY_HEAD=num_heads // num_key_heads, NUM_POSITIONS=num_positions,
        STOCHASTIC=rounding.is_stochastic, BLOCK_K=triton.next_power_of_2(key_dim), **tiles,
    )  # fmt: skip
    return o


def _update_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A: Tensor, dt_bias: Tensor, state: Tensor,
    read_slots: Tensor, write_slots: Tensor, seq_lens: Tensor | None, rounding: StateRounding,
) -> Tensor:  # fmt: skip
    num_rows, num_positions, num_heads, value_dim = v.shape
    num_key_heads, key_dim = k.shape[2:]
    o = torch.empty(v.shape)
    update_heads.parallel_for(
        num_rows * num_heads,
        max(1, _GRAIN_ELEMENTS // (num_positions * value_dim * key_dim)),
        *flat_rows(q, k, v, a, b),
        *(t.float() for t in (A, dt_bias)),
        *decode_states(state, read_slots, write_slots, seq_lens, rounding),
        np.float32(key_dim**-0.5),
        (num_positions, num_key_heads, key_dim, num_heads, value_dim),
        FlatArray(o),
    )
    return o.to(v.dtype)


_GRAIN_ELEMENTS = 2**18  # elements of state, which are read and written: about 100 µs if they are not cached


def gated_delta_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    *,
    seq_lens: Tensor | None = None,
    rounding: StateRounding = NEAREST,
) -> Tensor:
    """Advance the state of each of R rows by the row's ``T`` positions, in place in the pool.

    q and k ``[R, T, Hk, Dk]``, v ``[R, T, Hv, Dv]``, a and b ``[R, T, Hv]``, A (below 0) and dt_bias
    ``[Hv]``, state ``[num_slots, Hv, Dv, Dk]``, read_slots ``[R]``, write_slots ``[R, T]``. Row r starts
    from ``read_slots[r]``, which may be one of its own write slots; the state after position i goes to
    ``write_slots[r, i]`` unless this slot is 0. The pool is float32, or bfloat16 rounded by ``rounding``.
    seq_lens ``[R]``, tokens including the new ones, is needed if rounding is stochastic. Returns o
    ``[R, T, Hv, Dv]``, zero in padding rows (read slot 0).
    """
    assert seq_lens is not None or not rounding.is_stochastic
    operands = q, k, v, a, b, A, dt_bias, state, read_slots, write_slots
    if v.dtype == torch.float64:
        return gated_delta_update_reference(*operands, seq_lens=seq_lens, rounding=rounding)
    run = _launch if v.is_cuda else _update_on_cpu
    return run(*operands, seq_lens, rounding)
