"""One decode step of a Mamba-2 layer: the SSM recurrence over the ``T`` positions of each row.

    dt' = clamp(softplus(dt + dt_bias), *dt_limit)
    h_t = exp(A dt') h_{t-1} + dt' x_t B_t^T                    [P, N] a head
    y_t = h_t C_t + D x_t

Head h uses B and C of group ``h // (H // G)``. ``T = 1 + k``: with speculation, the state after each
position goes to a slot of its own, so that the next step may start after any accepted prefix.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from kernels.cpu_jit import as_array, as_flat_array, cpu_jit
from kernels.staged_slots import StagedSlots


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


# CPU path. In place, head by head; four rows of a head's state advance together and share each load of B and
# C, which makes the step as fast as memory.


@cpu_jit
def _softplus(v):
    # As torch: linear above 20, where the difference is below float32's last digit.
    return np.float32(math.log1p(math.exp(v))) if v <= 20.0 else v


@cpu_jit
def _advance_rows(state, offset, stride, decay, step, D, B, C, x, y):
    """Advance a head by one position: row p of its state is ``state[offset + p * stride :][:N]``."""
    num_rows, width = x.shape[0], B.shape[0]
    for p in range(0, num_rows - 3, 4):
        o = offset + p * stride
        h0, h1 = state[o : o + width], state[o + stride : o + stride + width]
        o += 2 * stride
        h2, h3 = state[o : o + width], state[o + stride : o + stride + width]
        u0, u1, u2, u3 = step * x[p], step * x[p + 1], step * x[p + 2], step * x[p + 3]
        y0 = y1 = y2 = y3 = np.float32(0.0)
        for n in range(width):
            b, c = B[n], C[n]
            v0, v1 = h0[n] * decay + u0 * b, h1[n] * decay + u1 * b
            v2, v3 = h2[n] * decay + u2 * b, h3[n] * decay + u3 * b
            h0[n], h1[n], h2[n], h3[n] = v0, v1, v2, v3
            y0, y1, y2, y3 = y0 + v0 * c, y1 + v1 * c, y2 + v2 * c, y3 + v3 * c
        y[p], y[p + 1] = y0 + D * x[p], y1 + D * x[p + 1]
        y[p + 2], y[p + 3] = y2 + D * x[p + 2], y3 + D * x[p + 3]
    for p in range(num_rows - num_rows % 4, num_rows):
        h = state[offset + p * stride : offset + p * stride + width]
        u, out = step * x[p], np.float32(0.0)
        for n in range(width):
            v = h[n] * decay + u * B[n]
            h[n] = v
            out += v * C[n]
        y[p] = out + D * x[p]


@cpu_jit
def _update_heads(
    x, dt, A, B, C, D, dt_bias, state, slot_stride, head_stride, row_stride,
    read_slots, write_slots, dt_min, dt_max, y, begin, end,
):  # fmt: skip
    """Item ``r * H + h``: all positions of head h of row r."""
    _, num_positions, num_heads, head_dim = x.shape
    heads_per_group, width = num_heads // B.shape[2], B.shape[3]
    unwritten = np.empty(head_dim * width, np.float32)  # stands in for write slot 0
    for item in range(begin, end):
        r, h = item // num_heads, item % num_heads
        slot = read_slots[r]
        if slot == 0:
            continue
        memory, offset, stride = state, slot * slot_stride + h * head_stride, row_stride
        for i in range(num_positions):
            step = _softplus(dt[r, i, h] + dt_bias[h])
            # Comparisons, because min() and max() lose a NaN.
            if step < dt_min:
                step = dt_min
            elif step > dt_max:
                step = dt_max
            source, source_offset, source_stride = memory, offset, stride
            if write_slots[r, i] == 0:
                memory, offset, stride = unwritten, 0, width
            else:
                memory, offset, stride = state, write_slots[r, i] * slot_stride + h * head_stride, row_stride
            if write_slots[r, i] != slot:
                slot = write_slots[r, i]
                for p in range(head_dim):
                    o, q = offset + p * stride, source_offset + p * source_stride
                    new, old = memory[o : o + width], source[q : q + width]
                    for n in range(width):
                        new[n] = old[n]
            decay = np.float32(math.exp(A[h] * step))
            B_i, C_i = B[r, i, h // heads_per_group], C[r, i, h // heads_per_group]
            _advance_rows(memory, offset, stride, decay, step, D[h], B_i, C_i, x[r, i, h], y[r, i, h])


def _selective_state_update_cpu(x, dt, A, B, C, D, dt_bias, ssm_state, read_slots, write_slots, dt_limit):
    if ssm_state.dtype != torch.float32:
        staged = StagedSlots.gather(ssm_state, read_slots, write_slots)
        y = _selective_state_update_cpu(
            x, dt, A, B, C, D, dt_bias, staged.pool, staged.read_slots, staged.write_slots, dt_limit
        )
        staged.scatter(ssm_state, write_slots)
        return y
    num_rows, num_positions, num_heads, head_dim = x.shape
    y = torch.zeros(x.shape)
    operands = (as_array(t.float().contiguous()) for t in (x, dt, A, B, C, D, dt_bias))
    _update_heads.parallel_for(
        num_rows * num_heads,
        max(1, _GRAIN_ELEMENTS // (num_positions * head_dim * B.shape[-1])),
        *operands,
        as_flat_array(ssm_state),
        *ssm_state.stride()[:3],
        as_array(read_slots.contiguous()),
        as_array(write_slots.contiguous()),
        *map(np.float32, dt_limit),
        as_array(y),
    )
    return y.to(x.dtype)


_GRAIN_ELEMENTS = 2**20  # of state, about 100 µs


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
    return _selective_state_update_cpu(
        x, dt, A, B, C, D, dt_bias, ssm_state, read_slots, write_slots, dt_limit
    )
