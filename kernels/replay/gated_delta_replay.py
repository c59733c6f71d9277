"""The replay form of :mod:`kernels.gated_delta.gated_delta_update`: a Gated DeltaNet layer's decode step with
one slot per row. :mod:`kernels.replay.kept_inputs` explains the form, and says what all replays have in
common.

| device | form |
|---|---|
| CUDA | Triton |
| CPU | numba (kernels/replay/gated_delta_replay_cpu.py) |
| any, in float64 | reference |
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.jit import FlatArray
from kernels.formats.stochastic_round import NEAREST, StateRounding, round_state, rounding_key
from kernels.gated_delta.gated_delta_update import (
    advance_tile,
    gated_delta_update_reference,
    reference_tokens,
    replay_tile_request,
)
from kernels.gated_delta.gated_delta_update_cpu import NORM_EPS
from kernels.gpu.tiles import choose
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.replay.gated_delta_flush import (
    KeptDeltaInputs,
    advance_pending,
    gated_delta_flush_reference,
    kept_arrays,
)
from kernels.replay.gated_delta_replay_cpu import replay_heads
from kernels.replay.kept_inputs import PendingRows, flushed_slots, reference_keep
from kernels.ssm.scan_row import fill_padding_positions, time_step
from kernels.ssm.state_arguments import decode_states, flat_rows

_GRAIN_ELEMENTS = 2**18  # as in the slots form


def gated_delta_replay_reference(
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
    kept: KeptDeltaInputs,
    pending: PendingRows,
    *,
    rounding: StateRounding = NEAREST,
) -> Tensor:
    """Reference of :func:`gated_delta_replay`: a flush, then an update that stores no state."""
    num_positions = v.shape[1]
    gated_delta_flush_reference(
        state, read_slots, write_slots, kept, pending.without_new(num_positions), rounding=rounding
    )
    slots = flushed_slots(read_slots, write_slots, pending)
    unstored = torch.zeros_like(slots)[:, None].repeat(1, num_positions)
    o = gated_delta_update_reference(
        *(q, k, v, a, b, A, dt_bias, state, slots, unstored), seq_lens=pending.seq_lens, rounding=rounding
    )
    acc = torch.promote_types(v.dtype, torch.float32)
    for r in range(len(v)):
        row = (t[r].to(acc) for t in (q, k, v, a, b))
        _, normalized, _, decay, beta = zip(*reference_tokens(row, A.to(acc), dt_bias.to(acc)), strict=True)
        heads = torch.stack(normalized)[:, :: v.shape[2] // k.shape[2]]
        gates = torch.stack([torch.stack(decay), torch.stack(beta)], dim=-1)
        one = PendingRows(*(t[r : r + 1] for t in (pending.rows, pending.counts, pending.seq_lens)))
        for tensor, values in ((kept.k, heads), (kept.v, v[r]), (kept.gates, gates)):
            reference_keep(tensor, values[None], read_slots[r : r + 1], one)
    return o


# One program per (row, value head, BLOCK_V rows of the state), as in the slots form. The tile is read once,
# and written once, as soon as the pending tokens are in it. The first program of a head keeps its gates, the
# first of a key head its k. These places are not those that other programs read.
@triton_jit
def _replay_tiles_kernel(
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
    kept_k_ptr,
    kept_v_ptr,
    kept_gates_ptr,
    rows_ptr,
    counts_ptr,
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
    PLACES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row, blocks_v = tl.program_id(1).to(tl.int64), tl.cdiv(value_dim, BLOCK_V)
    head = tl.program_id(0) // blocks_v
    key_head, num_key_heads = head // HEADS_PER_KEY_HEAD, num_heads // HEADS_PER_KEY_HEAD
    slot = tl.load(read_slots_ptr + row).to(tl.int64)
    block = tl.program_id(0) % blocks_v
    rows = block * BLOCK_V + tl.arange(0, BLOCK_V)
    columns = tl.arange(0, BLOCK_K)
    live_v, live_k = rows < value_dim, columns < key_dim
    live = live_v[:, None] & live_k[None, :]
    q_row = q_ptr + row * q_row_stride + key_head * q_head_stride + columns
    k_row = k_ptr + row * k_row_stride + key_head * k_head_stride + columns
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
    first_place = tl.load(rows_ptr + row).to(tl.int64) * PLACES
    count = tl.load(counts_ptr + row)
    known = tl.load(seq_lens_ptr + row) - NUM_POSITIONS
    kept_k = kept_k_ptr + (first_place * num_key_heads + key_head) * key_dim + columns
    kept_v = kept_v_ptr + (first_place * num_heads + head) * value_dim + rows
    kept_gates = kept_gates_ptr + (first_place * num_heads + head) * 2
    state_tile = state_ptr + head * head_stride + rows[:, None] * state_row_stride + columns[None, :]
    elements = rows[:, None] * key_dim + columns[None, :]
    S = tl.load(state_tile + slot * slot_stride, mask=live, other=0.0).to(tl.float32)
    S = advance_pending(
        S, kept_k, num_key_heads * key_dim, kept_v, num_heads * value_dim, kept_gates, num_heads * 2, rows,
        value_dim, columns, key_dim, state_ptr, elements, known - count, count, layer_seed, head + first_head,
        PLACES, STOCHASTIC,
    )  # fmt: skip
    if count > 0:
        target = tl.load(write_slots_ptr + row).to(tl.int64)
        tl.store(state_tile + target * slot_stride, S.to(state_ptr.dtype.element_ty), mask=live)
    is_first = block == 0
    keeps_k = columns < tl.where(is_first & (head % HEADS_PER_KEY_HEAD == 0), key_dim, 0)
    for i in tl.static_range(NUM_POSITIONS):
        place = (known + i) % PLACES
        tl.store(kept_v + place * num_heads * value_dim, v, mask=live_v)
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
        decay = tl.exp(A * time_step(a_i + dt_bias, 0.0, float("inf")))
        tl.store(kept_k + place * num_key_heads * key_dim, k_i, mask=keeps_k)
        tl.store(kept_gates + place * num_heads * 2, decay, mask=is_first)
        tl.store(kept_gates + place * num_heads * 2 + 1, beta, mask=is_first)
        S = advance_tile(S, k_i, v_i, decay, beta)
        o = tl.sum(S * q_i[None, :], axis=1)
        tl.store(o_row + i * num_heads * value_dim, o.to(o_ptr.dtype.element_ty), mask=live_v)
        if i + 1 < NUM_POSITIONS:
            key = rounding_key(layer_seed, head + first_head, known + i + 1)
            S = round_state(S, key, elements, state_ptr.dtype.element_ty, STOCHASTIC)


def _launch_replay(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A: Tensor, dt_bias: Tensor, state: Tensor,
    read_slots: Tensor, write_slots: Tensor, kept: KeptDeltaInputs, pending: PendingRows,
    rounding: StateRounding,
) -> Tensor:  # fmt: skip
    num_rows, num_positions, num_heads, value_dim = v.shape
    num_key_heads, key_dim = k.shape[2:]
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if num_rows == 0:
        return o
    tiles = choose(replay_tile_request(v.dtype, state.dtype, value_dim, key_dim), v.device)
    _replay_tiles_kernel[(num_heads * triton.cdiv(value_dim, tiles["BLOCK_V"]), num_rows)](
        q, k, v, a, b, A, dt_bias, state, read_slots, write_slots, kept.k, kept.v, kept.gates, pending.rows,
        pending.counts, pending.seq_lens, o, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        *a.stride()[:2], *b.stride()[:2], *state.stride()[:3], key_dim**-0.5, NORM_EPS, rounding.signed_seed,
        rounding.first_head, num_heads, value_dim, key_dim, HEADS_PER_KEY_HEAD=num_heads // num_key_heads,
        NUM_POSITIONS=num_positions, PLACES=kept.places, STOCHASTIC=rounding.is_stochastic,
        BLOCK_K=triton.next_power_of_2(key_dim), **tiles,
    )  # fmt: skip
    return o


def _replay_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A: Tensor, dt_bias: Tensor, state: Tensor,
    read_slots: Tensor, write_slots: Tensor, kept: KeptDeltaInputs, pending: PendingRows,
    rounding: StateRounding,
) -> Tensor:  # fmt: skip
    num_rows, num_positions, num_heads, value_dim = v.shape
    num_key_heads, key_dim = k.shape[2:]
    o = torch.empty(v.shape)
    replay_heads.parallel_for(
        num_rows * num_heads,
        max(1, _GRAIN_ELEMENTS // (num_positions * value_dim * key_dim)),
        *flat_rows(q, k, v, a, b),
        *(t.float() for t in (A, dt_bias)),
        *decode_states(state, read_slots, write_slots, pending.seq_lens, rounding),
        np.float32(key_dim**-0.5),
        (num_positions, num_key_heads, key_dim, num_heads, value_dim),
        *kept_arrays(kept, pending),
        FlatArray(o),
    )
    return o if v.dtype == torch.float32 else o.to(v.dtype)


def gated_delta_replay(
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
    kept: KeptDeltaInputs,
    pending: PendingRows,
    *,
    rounding: StateRounding = NEAREST,
) -> Tensor:
    """Advance each row's state by its pending tokens, and compute the outputs of its ``T`` new positions.

    Operands are those of :func:`kernels.gated_delta.gated_delta_update.gated_delta_update`, except that
    write_slots is ``[R]``. The inputs of the new positions are kept in ``kept``. Returns o
    ``[R, T, Hv, Dv]``, zero in padding rows.
    """
    assert kept.places >= 2 * v.shape[1]
    operands = q, k, v, a, b, A, dt_bias, state, read_slots, write_slots, kept, pending
    if v.dtype == torch.float64:
        return gated_delta_replay_reference(*operands, rounding=rounding)
    run = _launch_replay if v.is_cuda else _replay_on_cpu
    return run(*operands, rounding)
