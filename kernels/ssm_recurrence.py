"""The SSM recurrence of decode rows on CPU, in place in the pool (``update_heads``).

    h_t = decay_t h_{t-1} + step_t x_t B_t^T,    y_t = h_t C_t + D x_t

Four rows of a head's ``[P, N]`` state advance together and share each load of B and C: as fast as memory.
Prefill, where states are used again and again, is ssd_scan_cpu.py.

Arrays are flat with explicit strides where they may be views of something wider; the last axis is adjacent.
"""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu_jit import cpu_jit


@cpu_jit
def _softplus(v):
    # As torch: linear above 20, where the difference is below float32's last digit.
    return np.float32(math.log1p(math.exp(v))) if v <= 20.0 else v


@cpu_jit
def _advance(state, offset, stride, decay, step, D, B, C, x, y):
    """One token of one head: row p of its state is ``state[offset + p * stride :][:N]``."""
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
def _time_step(dt, dt_limit):
    """softplus within limits; comparisons, because min() and max() lose a NaN."""
    step = _softplus(dt)
    if step < dt_limit[0]:
        return dt_limit[0]
    return dt_limit[1] if step > dt_limit[1] else step


@cpu_jit
def scan_steps(dt, dt_bias, A, dt_limit, step, decay, begin, end):
    """``step`` and ``decay`` ``[H, n]`` of heads ``begin`` to ``end`` of a prompt, as decode rows have them.

    Element by element: torch's vectorized functions round the last elements of a tensor in another way, so
    that a token's bits would depend on who else is in the batch.
    """
    for h in range(begin, end):
        for t in range(dt.shape[0]):
            step[h, t] = _time_step(dt[t, h] + dt_bias[h], dt_limit)
            decay[h, t] = np.float32(math.exp(A[h] * step[h, t]))


@cpu_jit
def update_heads(
    x, x_strides, dt, dt_strides, B, B_strides, C, C_strides, A, D, dt_bias, state, state_strides,
    read_slots, write_slots, dt_limit, shape, y, begin, end,
):  # fmt: skip
    """Item ``r * H + h``: all positions of head h of decode row r. ``shape`` is T, H, P, G, N; y is flat."""
    num_positions, num_heads, head_dim, num_groups, width = shape
    slot_stride, head_stride, row_stride = state_strides
    heads_per_group = num_heads // num_groups
    unwritten = np.empty(head_dim * width, np.float32)  # stands in for write slot 0
    for item in range(begin, end):
        r, h = item // num_heads, item % num_heads
        g = h // heads_per_group
        slot = read_slots[r]
        memory, offset, stride = state, slot * slot_stride + h * head_stride, row_stride
        for i in range(num_positions):
            o = ((r * num_positions + i) * num_heads + h) * head_dim
            out = y[o : o + head_dim]
            if read_slots[r] == 0:
                out[:] = np.float32(0)
                continue
            step = _time_step(dt[r * dt_strides[0] + i * dt_strides[1] + h] + dt_bias[h], dt_limit)
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
            o = r * x_strides[0] + i * x_strides[1] + h * x_strides[2]
            b = r * B_strides[0] + i * B_strides[1] + g * B_strides[2]
            c = r * C_strides[0] + i * C_strides[1] + g * C_strides[2]
            _advance(
                memory, offset, stride, decay, step, D[h],
                B[b : b + width], C[c : c + width], x[o : o + head_dim], out,
            )  # fmt: skip
