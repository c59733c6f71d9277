"""The SSM recurrence on CPU, in place in the pool: prefill (``scan_heads``) and decode (``update_heads``).

    h_t = decay_t h_{t-1} + step_t x_t B_t^T,    y_t = h_t C_t + D x_t

Four rows of a head's ``[P, N]`` state advance together and share each load of B and C; in prefill by two
tokens, so that a loaded state is used twice. Decode is then as fast as memory. Prefill does fewer operations
than the chunked form (no ``[Q, Q]`` score matrix, no exponentials beside the decays) and beats it with the
best GEMM: docs/decisions/002-cpu-kernels.md.

Arrays are flat with explicit strides where they may be views of something wider; the last axis is adjacent.
"""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu_jit import cpu_jit

_TOKENS_IN_CACHE = 32  # B and C of so many tokens stay in the first-level cache: 32 KB at N = 128


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
def _advance_by_twos(
    state, offset, stride, step, decay, D, h, x, x_offset, x_stride, B, B_offset, B_stride,
    C, C_offset, C_stride, width, y, y_offset, first, last,
):  # fmt: skip
    """Tokens ``first`` to ``last``, an even number of them, of four rows of head h."""
    h0, h1 = state[offset : offset + width], state[offset + stride : offset + stride + width]
    offset += 2 * stride
    h2, h3 = state[offset : offset + width], state[offset + stride : offset + stride + width]
    y_stride = y.shape[0] // step.shape[0]
    for t in range(first, last, 2):
        a, b, c = x_offset + t * x_stride, B_offset + t * B_stride, C_offset + t * C_stride
        B0, B1 = B[b : b + width], B[b + B_stride : b + B_stride + width]
        C0, C1 = C[c : c + width], C[c + C_stride : c + C_stride + width]
        x0, x1 = x[a : a + 4], x[a + x_stride : a + x_stride + 4]
        a = y_offset + t * y_stride
        y0, y1 = y[a : a + 4], y[a + y_stride : a + y_stride + 4]
        decay0, decay1, step0, step1 = decay[t, h], decay[t + 1, h], step[t, h], step[t + 1, h]
        u0, u1, u2, u3 = step0 * x0[0], step0 * x0[1], step0 * x0[2], step0 * x0[3]
        w0, w1, w2, w3 = step1 * x1[0], step1 * x1[1], step1 * x1[2], step1 * x1[3]
        p0 = p1 = p2 = p3 = q0 = q1 = q2 = q3 = np.float32(0.0)
        for n in range(width):
            b_n, c_n = B0[n], C0[n]
            v0, v1 = h0[n] * decay0 + u0 * b_n, h1[n] * decay0 + u1 * b_n
            v2, v3 = h2[n] * decay0 + u2 * b_n, h3[n] * decay0 + u3 * b_n
            p0, p1, p2, p3 = p0 + v0 * c_n, p1 + v1 * c_n, p2 + v2 * c_n, p3 + v3 * c_n
            b_n, c_n = B1[n], C1[n]
            v0, v1 = v0 * decay1 + w0 * b_n, v1 * decay1 + w1 * b_n
            v2, v3 = v2 * decay1 + w2 * b_n, v3 * decay1 + w3 * b_n
            q0, q1, q2, q3 = q0 + v0 * c_n, q1 + v1 * c_n, q2 + v2 * c_n, q3 + v3 * c_n
            h0[n], h1[n], h2[n], h3[n] = v0, v1, v2, v3
        y0[0], y0[1], y0[2], y0[3] = p0 + D * x0[0], p1 + D * x0[1], p2 + D * x0[2], p3 + D * x0[3]
        y1[0], y1[1], y1[2], y1[3] = q0 + D * x1[0], q1 + D * x1[1], q2 + D * x1[2], q3 + D * x1[3]


@cpu_jit
def scan_heads(
    x, x_token_stride, x_head_stride, B, B_token_stride, B_group_stride, C, C_token_stride, C_group_stride,
    step, decay, D, num_groups, head_dim, width, state, slot_stride, head_stride, row_stride,
    bounds, read_slots, write_slots, has_initial, y, begin, end,
):  # fmt: skip
    """Items are heads: all rows of a prefill batch, in order, so that a row may start where an earlier ended.

    step and decay ``[num_tokens, H]``, y zero.
    """
    num_heads = step.shape[1]
    num_fours = head_dim - head_dim % 4
    for item in range((end - begin) * read_slots.shape[0]):
        h, s = begin + item // read_slots.shape[0], item % read_slots.shape[0]
        if write_slots[s] == 0 or bounds[s] == bounds[s + 1]:
            continue
        offset = write_slots[s] * slot_stride + h * head_stride
        source = read_slots[s] * slot_stride + h * head_stride
        for p in range(head_dim):
            o, q = offset + p * row_stride, source + p * row_stride
            if not has_initial[s]:
                state[o : o + width] = np.float32(0.0)
            elif o != q:
                state[o : o + width] = state[q : q + width]
        g = h // (num_heads // num_groups)
        xo, bo, co = h * x_head_stride, g * B_group_stride, g * C_group_stride
        for first in range(bounds[s], bounds[s + 1], _TOKENS_IN_CACHE):
            last = min(first + _TOKENS_IN_CACHE, bounds[s + 1])
            paired = last - (last - first) % 2
            for p in range(0, num_fours, 4):
                _advance_by_twos(
                    state, offset + p * row_stride, row_stride, step, decay, D[h], h,
                    x, xo + p, x_token_stride, B, bo, B_token_stride, C, co, C_token_stride, width,
                    y, h * head_dim + p, first, paired,
                )  # fmt: skip
            for t in range(first, last):
                # What that left: an odd last token, and the rows after the last four.
                p = num_fours if t < paired else 0
                if p < head_dim:
                    a, b, c = xo + t * x_token_stride, bo + t * B_token_stride, co + t * C_token_stride
                    o = (t * num_heads + h) * head_dim
                    _advance(
                        state, offset + p * row_stride, row_stride, decay[t, h], step[t, h], D[h],
                        B[b : b + width], C[c : c + width], x[a + p : a + head_dim], y[o + p : o + head_dim],
                    )  # fmt: skip


@cpu_jit
def update_heads(
    x, dt, A, B, C, D, dt_bias, state, slot_stride, head_stride, row_stride,
    read_slots, write_slots, dt_min, dt_max, y, begin, end,
):  # fmt: skip
    """Item ``r * H + h``: all positions of head h of decode row r."""
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
            _advance(memory, offset, stride, decay, step, D[h], B_i, C_i, x[r, i, h], y[r, i, h])
