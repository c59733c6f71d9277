"""The replay form of :mod:`kernels.ssm.selective_state_update`: a Mamba-2 layer's decode step with one slot
per row. :mod:`kernels.replay.kept_inputs` explains the form, and says what all replays have in common.

| device | form |
|---|---|
| CUDA | Triton |
| CPU | numba (kernels/replay/selective_state_replay_cpu.py) |
| any, in float64 | reference |
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.jit import FlatArray
from kernels.formats.stochastic_round import NEAREST, StateRounding, round_state, rounding_key
from kernels.gpu.tiles import choose
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.replay.kept_inputs import PendingRows, flushed_slots, reference_keep
from kernels.replay.selective_state_flush import (
    KeptSsmInputs,
    advance_pending,
    kept_arrays,
    selective_state_flush_reference,
)
from kernels.replay.selective_state_replay_cpu import replay_heads
from kernels.ssm.scan_row import fill_padding_positions, time_step
from kernels.ssm.selective_state_update import (
    advance_tile,
    reference_gates,
    replay_tile_request,
    selective_state_update_reference,
)
from kernels.ssm.state_arguments import decode_states, flat_rows

_GRAIN_ELEMENTS = 2**18  # as in the slots form


def selective_state_replay_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    kept: KeptSsmInputs,
    pending: PendingRows,
    *,
    dt_limit: tuple[float, float],
    rounding: StateRounding = NEAREST,
) -> Tensor:
    """Reference of :func:`selective_state_replay`: a flush, then an update that stores no state."""
    num_positions = x.shape[1]
    selective_state_flush_reference(
        ssm_state, read_slots, write_slots, kept, pending.without_new(num_positions), rounding=rounding
    )
    slots = flushed_slots(read_slots, write_slots, pending)
    unstored = torch.zeros_like(slots)[:, None].repeat(1, num_positions)
    y = selective_state_update_reference(
        *(x, dt, A, B, C, D, dt_bias, ssm_state, slots, unstored),
        dt_limit=dt_limit,
        seq_lens=pending.seq_lens,
        rounding=rounding,
    )
    acc = torch.promote_types(x.dtype, torch.float32)
    gates = torch.empty((*dt.shape, 2), dtype=acc, device=dt.device)
    for token, gate in zip(dt.to(acc).flatten(0, 1), gates.flatten(0, 1), strict=True):
        # Token by token: see selective_state_update_reference.
        gate[:] = torch.stack(reference_gates(token, A, dt_bias, dt_limit), dim=-1)
    for tensor, values in ((kept.x, x), (kept.gates, gates), (kept.B, B)):
        reference_keep(tensor, values, read_slots, pending)
    return y


# One program per (row, head, BLOCK_P rows of the state), as in the slots form. The tile is read once, and
# written once, as soon as the pending tokens are in it. The first program of a head keeps its gates, the
# first of a group its B. These places are not those that other programs read.
@triton_jit
def _replay_tiles_kernel(
    x_ptr,
    dt_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    dt_bias_ptr,
    state_ptr,
    read_slots_ptr,
    write_slots_ptr,
    kept_x_ptr,
    kept_gates_ptr,
    kept_B_ptr,
    rows_ptr,
    counts_ptr,
    seq_lens_ptr,
    y_ptr,
    x_row_stride,
    x_position_stride,
    x_head_stride,
    dt_row_stride,
    dt_position_stride,
    B_row_stride,
    B_position_stride,
    B_group_stride,
    C_row_stride,
    C_position_stride,
    C_group_stride,
    slot_stride,
    head_stride,
    state_row_stride,
    dt_min,
    dt_max,
    layer_seed,
    first_head,
    num_heads,
    head_dim,
    state_dim,
    HEADS_PER_GROUP: tl.constexpr,
    NUM_POSITIONS: tl.constexpr,
    PLACES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row, blocks_p = tl.program_id(1).to(tl.int64), tl.cdiv(head_dim, BLOCK_P)
    head = tl.program_id(0) // blocks_p
    group, num_groups = head // HEADS_PER_GROUP, num_heads // HEADS_PER_GROUP
    slot = tl.load(read_slots_ptr + row).to(tl.int64)
    block = tl.program_id(0) % blocks_p
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    live_p, live_n = p < head_dim, n < state_dim
    live = live_p[:, None] & live_n[None, :]
    x_row = x_ptr + row * x_row_stride + head * x_head_stride + p
    dt_row = dt_ptr + row * dt_row_stride + head
    B_row = B_ptr + row * B_row_stride + group * B_group_stride + n
    C_row = C_ptr + row * C_row_stride + group * C_group_stride + n
    y_row = y_ptr + (row * NUM_POSITIONS * num_heads + head) * head_dim + p
    dt = tl.load(dt_row)
    x = tl.load(x_row, mask=live_p, other=0.0)
    B = tl.load(B_row, mask=live_n, other=0.0)
    C = tl.load(C_row, mask=live_n, other=0.0)
    A = tl.load(A_ptr + head).to(tl.float32)
    D = tl.load(D_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    if slot == 0:  # padding: y is zero
        fill_padding_positions(y_row, num_heads * head_dim, live_p, NUM_POSITIONS, BLOCK_P)
        return
    first_place = tl.load(rows_ptr + row).to(tl.int64) * PLACES
    count = tl.load(counts_ptr + row)
    known = tl.load(seq_lens_ptr + row) - NUM_POSITIONS
    kept_x = kept_x_ptr + (first_place * num_heads + head) * head_dim + p
    kept_gates = kept_gates_ptr + (first_place * num_heads + head) * 2
    kept_B = kept_B_ptr + (first_place * num_groups + group) * state_dim + n
    state_tile = state_ptr + head * head_stride + p[:, None] * state_row_stride + n[None, :]
    elements = p[:, None] * state_dim + n[None, :]
    h = tl.load(state_tile + slot * slot_stride, mask=live, other=0.0).to(tl.float32)
    h = advance_pending(
        h, kept_x, num_heads * head_dim, kept_gates, num_heads * 2, kept_B, num_groups * state_dim, p,
        head_dim, n, state_dim, state_ptr, elements, known - count, count, layer_seed, head + first_head,
        PLACES, STOCHASTIC,
    )  # fmt: skip
    if count > 0:
        target = tl.load(write_slots_ptr + row).to(tl.int64)
        tl.store(state_tile + target * slot_stride, h.to(state_ptr.dtype.element_ty), mask=live)
    is_first = block == 0
    keeps_B = n < tl.where(is_first & (head % HEADS_PER_GROUP == 0), state_dim, 0)
    for i in tl.static_range(NUM_POSITIONS):
        place = (known + i) % PLACES
        tl.store(kept_x + place * num_heads * head_dim, x, mask=live_p)
        tl.store(kept_B + place * num_groups * state_dim, B, mask=keeps_B)
        dt_i, x_i, B_i, C_i = dt.to(tl.float32), x.to(tl.float32), B.to(tl.float32), C.to(tl.float32)
        if i + 1 < NUM_POSITIONS:
            dt = tl.load(dt_row + (i + 1) * dt_position_stride)
            x = tl.load(x_row + (i + 1) * x_position_stride, mask=live_p, other=0.0)
            B = tl.load(B_row + (i + 1) * B_position_stride, mask=live_n, other=0.0)
            C = tl.load(C_row + (i + 1) * C_position_stride, mask=live_n, other=0.0)
        step = time_step(dt_i + dt_bias, dt_min, dt_max)
        decay = tl.exp(A * step)
        tl.store(kept_gates + place * num_heads * 2, decay, mask=is_first)
        tl.store(kept_gates + place * num_heads * 2 + 1, step, mask=is_first)
        h = advance_tile(h, x_i, decay, step, B_i)
        y = tl.sum(h * C_i[None, :], axis=1) + D * x_i
        tl.store(y_row + i * num_heads * head_dim, y.to(y_ptr.dtype.element_ty), mask=live_p)
        if i + 1 < NUM_POSITIONS:
            key = rounding_key(layer_seed, head + first_head, known + i + 1)
            h = round_state(h, key, elements, state_ptr.dtype.element_ty, STOCHASTIC)


def _launch_replay(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, ssm_state: Tensor,
    read_slots: Tensor, write_slots: Tensor, kept: KeptSsmInputs, pending: PendingRows,
    dt_limit: tuple[float, float], rounding: StateRounding,
) -> Tensor:  # fmt: skip
    num_rows, num_positions, num_heads, head_dim = x.shape
    num_groups, state_dim = B.shape[2:]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    tiles = choose(replay_tile_request(x.dtype, ssm_state.dtype, head_dim, state_dim), x.device)
    _replay_tiles_kernel[(num_heads * triton.cdiv(head_dim, tiles["BLOCK_P"]), num_rows)](
        x, dt, A, B, C, D, dt_bias, ssm_state, read_slots, write_slots, kept.x, kept.gates, kept.B,
        pending.rows, pending.counts, pending.seq_lens, y, *x.stride()[:3], *dt.stride()[:2],
        *B.stride()[:3], *C.stride()[:3], *ssm_state.stride()[:3], *dt_limit, rounding.signed_seed,
        rounding.first_head, num_heads, head_dim, state_dim, HEADS_PER_GROUP=num_heads // num_groups,
        NUM_POSITIONS=num_positions, PLACES=kept.places, STOCHASTIC=rounding.is_stochastic,
        BLOCK_N=triton.next_power_of_2(state_dim), **tiles,
    )  # fmt: skip
    return y


def _replay_on_cpu(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, ssm_state: Tensor,
    read_slots: Tensor, write_slots: Tensor, kept: KeptSsmInputs, pending: PendingRows,
    dt_limit: tuple[float, float], rounding: StateRounding,
) -> Tensor:  # fmt: skip
    num_rows, num_positions, num_heads, head_dim = x.shape
    num_groups, width = B.shape[2:]
    y = torch.empty(x.shape, dtype=torch.float32)
    replay_heads.parallel_for(
        num_rows * num_heads,
        max(1, _GRAIN_ELEMENTS // (num_positions * head_dim * width)),
        *flat_rows(x, dt, B, C),
        *(t.float() for t in (A, D, dt_bias)),
        *decode_states(ssm_state, read_slots, write_slots, pending.seq_lens, rounding),
        (np.float32(dt_limit[0]), np.float32(dt_limit[1])),
        (num_positions, num_heads, head_dim, num_groups, width),
        *kept_arrays(kept, pending),
        FlatArray(y),
    )
    return y if x.dtype == torch.float32 else y.to(x.dtype)


def selective_state_replay(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    kept: KeptSsmInputs,
    pending: PendingRows,
    *,
    dt_limit: tuple[float, float],
    rounding: StateRounding = NEAREST,
) -> Tensor:
    """Advance each row's state by its pending tokens, and compute the outputs of its ``T`` new positions.

    Operands are those of :func:`kernels.ssm.selective_state_update.selective_state_update`, except that
    write_slots is ``[R]``. The inputs of the new positions are kept in ``kept``, whose rows have at least
    ``a + T`` places. Returns y ``[R, T, H, P]``, zero in padding rows.
    """
    assert kept.places >= 2 * x.shape[1]
    operands = (x, dt, A, B, C, D, dt_bias, ssm_state, read_slots, write_slots, kept, pending)
    if x.dtype == torch.float64:
        return selective_state_replay_reference(*operands, dt_limit=dt_limit, rounding=rounding)
    run = _launch_replay if x.is_cuda else _replay_on_cpu
    return run(*operands, dt_limit, rounding)
