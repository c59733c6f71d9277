"""One decode step of a Mamba-2 layer: the SSM recurrence over the ``T`` positions of each row.

    dt' = clamp(softplus(dt + dt_bias), *dt_limit)
    h_t = exp(A dt') h_{t-1} + dt' x_t B_t^T                    [P, N] a head
    y_t = h_t C_t + D x_t

Head h uses B and C of group ``h // (H // G)``. ``T = 1 + k``: with speculation, the state after each
position goes to a slot of its own, so that the next step may start after any accepted prefix.

| device | form |
|---|---|
| CUDA | Triton |
| CPU | numba, in place (kernels/ssm_recurrence.py) |
| float64 anywhere | reference |
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F

from kernels.cpu_jit import as_array, as_flat_array
from kernels.ssm_recurrence import update_heads
from kernels.staged_slots import StagedSlots
from kernels.tiles import TileRequest, choose
from kernels.time_step import time_step
from kernels.triton_jit import tl, triton, triton_jit


def selective_state_update_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    *,
    dt_limit: tuple[float, float],
) -> torch.Tensor:
    """:func:`selective_state_update`, one row and position after the other."""
    acc = torch.promote_types(x.dtype, torch.float32)
    heads_per_group = x.shape[2] // B.shape[2]
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    for r, (source, targets) in enumerate(zip(read_slots.tolist(), write_slots.tolist(), strict=True)):
        if source == 0:
            continue
        h = ssm_state[source].to(acc)
        for i, target in enumerate(targets):
            step = F.softplus(dt[r, i].to(acc) + dt_bias.to(acc)).clamp(*dt_limit)
            B_i, C_i = (t[r, i].to(acc).repeat_interleave(heads_per_group, dim=0) for t in (B, C))
            x_i = x[r, i].to(acc)
            decay = torch.exp(A.to(acc) * step)
            h = decay[:, None, None] * h + (step[:, None] * x_i)[:, :, None] * B_i[:, None, :]
            y[r, i] = (h * C_i[:, None, :]).sum(dim=-1) + D.to(acc)[:, None] * x_i
            if target != 0:
                ssm_state[target] = h
    return y


# One program a (row, head, BLOCK_P rows of the state): its [BLOCK_P, N] tile stays in registers over all
# positions, so that the state is read once, and written once a position. The step is bound by that traffic:
# neighbours on axis 0 take neighbouring tiles of a slot, and a position's small operands are on their way
# before the one ahead of it is computed, the first of them before the slot is known.
@triton_jit
def _update_tiles_kernel(
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
    num_heads,
    head_dim,
    state_dim,
    HEADS_PER_GROUP: tl.constexpr,
    NUM_POSITIONS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row, blocks_p = tl.program_id(1).to(tl.int64), tl.cdiv(head_dim, BLOCK_P)
    head = tl.program_id(0) // blocks_p
    slot = tl.load(read_slots_ptr + row).to(tl.int64)
    p = tl.program_id(0) % blocks_p * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    live_p, live_n = p < head_dim, n < state_dim
    live = live_p[:, None] & live_n[None, :]
    x_row = x_ptr + row * x_row_stride + head * x_head_stride + p
    dt_row = dt_ptr + row * dt_row_stride + head
    B_row = B_ptr + row * B_row_stride + head // HEADS_PER_GROUP * B_group_stride + n
    C_row = C_ptr + row * C_row_stride + head // HEADS_PER_GROUP * C_group_stride + n
    y_row = y_ptr + (row * NUM_POSITIONS * num_heads + head) * head_dim + p
    dt = tl.load(dt_row)
    x = tl.load(x_row, mask=live_p, other=0.0)
    B = tl.load(B_row, mask=live_n, other=0.0)
    C = tl.load(C_row, mask=live_n, other=0.0)
    A = tl.load(A_ptr + head).to(tl.float32)
    D = tl.load(D_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    if slot == 0:  # padding: y is zero
        for i in tl.static_range(NUM_POSITIONS):
            zeros = tl.zeros((BLOCK_P,), y_ptr.dtype.element_ty)
            tl.store(y_row + i * num_heads * head_dim, zeros, mask=live_p)
        return
    state_tile = state_ptr + head * head_stride + p[:, None] * state_row_stride + n[None, :]
    h = tl.load(state_tile + slot * slot_stride, mask=live, other=0.0).to(tl.float32)
    for i in tl.static_range(NUM_POSITIONS):
        dt_i, x_i, B_i, C_i = dt.to(tl.float32), x.to(tl.float32), B.to(tl.float32), C.to(tl.float32)
        if i + 1 < NUM_POSITIONS:
            dt = tl.load(dt_row + (i + 1) * dt_position_stride)
            x = tl.load(x_row + (i + 1) * x_position_stride, mask=live_p, other=0.0)
            B = tl.load(B_row + (i + 1) * B_position_stride, mask=live_n, other=0.0)
            C = tl.load(C_row + (i + 1) * C_position_stride, mask=live_n, other=0.0)
        step = time_step(dt_i + dt_bias, dt_min, dt_max)
        h = h * tl.exp(A * step) + (step * x_i)[:, None] * B_i[None, :]
        y = tl.sum(h * C_i[None, :], axis=1) + D * x_i
        tl.store(y_row + i * num_heads * head_dim, y.to(y_ptr.dtype.element_ty), mask=live_p)
        target = tl.load(write_slots_ptr + row * NUM_POSITIONS + i).to(tl.int64)
        if target != 0:
            tl.store(state_tile + target * slot_stride, h.to(state_ptr.dtype.element_ty), mask=live)


@functools.cache
def tile_request(
    dtype: torch.dtype, state_dtype: torch.dtype, head_dim: int, state_dim: int, positions: int
) -> TileRequest:
    """2,048 elements of state a tile: 16 a thread on their way at once, and 4 programs an SM at batch 1."""
    block_p = min(triton.next_power_of_2(head_dim), max(1, 2048 // triton.next_power_of_2(state_dim)))
    return TileRequest.of(
        "selective_state_update",
        {"BLOCK_P": block_p, "num_warps": 4},
        dtype=dtype,
        state_dtype=state_dtype,
        head_dim=head_dim,
        state_dim=state_dim,
        positions=positions,
    )


def _launch(x, dt, A, B, C, D, dt_bias, ssm_state, read_slots, write_slots, dt_limit):
    num_rows, num_positions, num_heads, head_dim = x.shape
    num_groups, state_dim = B.shape[2:]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    request = tile_request(x.dtype, ssm_state.dtype, head_dim, state_dim, num_positions)
    tiles = choose(request, x.device)
    _update_tiles_kernel[(num_heads * triton.cdiv(head_dim, tiles["BLOCK_P"]), num_rows)](
        x,
        dt,
        A,
        B,
        C,
        D,
        dt_bias,
        ssm_state,
        read_slots,
        write_slots.contiguous(),
        y,
        *x.stride()[:3],
        *dt.stride()[:2],
        *B.stride()[:3],
        *C.stride()[:3],
        *ssm_state.stride()[:3],
        *dt_limit,
        num_heads,
        head_dim,
        state_dim,
        HEADS_PER_GROUP=num_heads // num_groups,
        NUM_POSITIONS=num_positions,
        BLOCK_N=triton.next_power_of_2(state_dim),
        **tiles,
    )
    return y


def _selective_state_update_cpu(x, dt, A, B, C, D, dt_bias, ssm_state, read_slots, write_slots, dt_limit):
    if ssm_state.dtype != torch.float32:
        write_slots = torch.where(read_slots[:, None] != 0, write_slots, 0)
        staged = StagedSlots.gather(ssm_state, read_slots, write_slots)
        y = _selective_state_update_cpu(
            x, dt, A, B, C, D, dt_bias, staged.pool, staged.read_slots, staged.write_slots, dt_limit
        )
        staged.scatter(ssm_state, write_slots)
        return y
    num_rows, num_positions, num_heads, head_dim = x.shape
    num_groups, width = B.shape[2:]
    y = torch.empty(x.shape)
    rows = (_adjacent(t.float()) for t in (x, dt, B, C))
    update_heads.parallel_for(
        num_rows * num_heads,
        max(1, _GRAIN_ELEMENTS // (num_positions * head_dim * width)),
        *(part for t in rows for part in (as_flat_array(t), t.stride()[:3])),
        *(as_array(t.float()) for t in (A, D, dt_bias)),
        as_flat_array(ssm_state),
        ssm_state.stride()[:3],
        as_array(read_slots),
        as_array(write_slots.contiguous()),
        (np.float32(dt_limit[0]), np.float32(dt_limit[1])),
        (num_positions, num_heads, head_dim, num_groups, width),
        as_array(y).ravel(),
    )
    return y.to(x.dtype)


def _adjacent(t: torch.Tensor) -> torch.Tensor:
    """Elements of the last axis side by side; copied only where they are not."""
    return t if t.stride(-1) == 1 else t.contiguous()


_GRAIN_ELEMENTS = 2**18  # of state, which is read and written: about 100 µs out of the cache


def selective_state_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    *,
    dt_limit: tuple[float, float],
) -> torch.Tensor:
    """Advance each row's state by its ``T`` positions, in place in the pool.

    x ``[R, T, H, P]``, dt ``[R, T, H]``, A, D and dt_bias ``[H]``, B and C ``[R, T, G, N]``, ssm_state
    ``[num_slots, H, P, N]``, read_slots ``[R]``, write_slots ``[R, T]``. Row r starts from
    ``read_slots[r]``, which may be one of its own write slots; the state after position i goes to
    ``write_slots[r, i]`` unless that is 0. Returns y ``[R, T, H, P]``; zero in padding rows (read slot 0).
    """
    if x.dtype == torch.float64:
        return selective_state_update_reference(
            x, dt, A, B, C, D, dt_bias, ssm_state, read_slots, write_slots, dt_limit=dt_limit
        )
    if x.is_cuda:
        return _launch(x, dt, A, B, C, D, dt_bias, ssm_state, read_slots, write_slots, dt_limit)
    return _selective_state_update_cpu(
        x, dt, A, B, C, D, dt_bias, ssm_state, read_slots, write_slots, dt_limit
    )
