"""The SSM recurrence of decode rows on CPU, in place in the pool (``update_heads``).

    h_t = decay_t h_{t-1} + step_t x_t B_t^T,    y_t = h_t C_t + D x_t

Four rows of a head's ``[P, N]`` state advance together, in vector registers, and share each load of B and C.
A position reads the state from the slot that the previous position wrote, and writes its own slot. So nothing
is copied, and with a state of 16 bits each position sees the stored values. Prefill, which uses a state for
many tokens, is in ssd_chunk_scan_cpu.py.

Arrays are flat, with explicit strides if they may be views of wider ones; the last axis is contiguous.
"""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu.jit import cpu_jit
from kernels.cpu.vector import (
    lanes,
    load,
    load_number,
    multiply,
    multiply_add,
    multiply_add_number,
    prefetch,
    rounded,
    rounded_number,
    rounding_key,
    splat,
    store,
    store_number,
    sum_of,
)

_ZERO = np.float32(0)
_ROWS_AHEAD = 16  # distance of prefetches in rows: the core's own prefetcher does not look so far ahead


@cpu_jit
def softplus(v):
    # Like torch: linear above 20, where the difference is below float32's last digit.
    return np.float32(math.log1p(math.exp(v))) if v <= 20.0 else v


@cpu_jit
def _advance(
    source, first, stride, target, target_first, target_stride, decay, step, D, B, b, C, c, x, o, y, out,
    num_rows, width, by_chance, key,
):  # fmt: skip
    """Advance a head's state by one token, from source to target, which may be the same array.

    Row p of the old state is ``source[first + p * stride :][:width]``. B, C, x and y begin at b, c, o and
    out. Outputs are computed from the state before it is rounded to a target of 16 bits.
    """
    w = lanes()
    whole, decays, ahead = width - width % w, splat(decay), _ROWS_AHEAD * stride
    p = 0
    while p + 4 <= num_rows:
        s0, t0 = first + p * stride, target_first + p * target_stride
        s1, t1 = s0 + stride, t0 + target_stride
        s2, t2 = s1 + stride, t1 + target_stride
        s3, t3 = s2 + stride, t2 + target_stride
        u0, u1, u2, u3 = step * x[o + p], step * x[o + p + 1], step * x[o + p + 2], step * x[o + p + 3]
        a0, a1, a2, a3 = splat(u0), splat(u1), splat(u2), splat(u3)
        y0, y1, y2, y3 = splat(_ZERO), splat(_ZERO), splat(_ZERO), splat(_ZERO)
        for n in range(0, whole, w):
            input_n, output_n = load(B, b + n), load(C, c + n)
            prefetch(source, s0 + ahead + n)
            prefetch(source, s1 + ahead + n)
            prefetch(source, s2 + ahead + n)
            prefetch(source, s3 + ahead + n)
            h0 = multiply_add(load(source, s0 + n), decays, multiply(a0, input_n))
            h1 = multiply_add(load(source, s1 + n), decays, multiply(a1, input_n))
            h2 = multiply_add(load(source, s2 + n), decays, multiply(a2, input_n))
            h3 = multiply_add(load(source, s3 + n), decays, multiply(a3, input_n))
            e = p * width + n
            store(target, t0 + n, rounded(target, h0, by_chance, key, e, 1))
            store(target, t1 + n, rounded(target, h1, by_chance, key, e + width, 1))
            store(target, t2 + n, rounded(target, h2, by_chance, key, e + 2 * width, 1))
            store(target, t3 + n, rounded(target, h3, by_chance, key, e + 3 * width, 1))
            y0, y1 = multiply_add(h0, output_n, y0), multiply_add(h1, output_n, y1)
            y2, y3 = multiply_add(h2, output_n, y2), multiply_add(h3, output_n, y3)
        r0, r1, r2, r3 = sum_of(y0), sum_of(y1), sum_of(y2), sum_of(y3)
        # These two loops are not one: if a loop over single numbers also stored, the compiler would choose
        # the order of its sums by whether source is target.
        for n in range(whole, width):
            input_1, output_1 = B[b + n], C[c + n]
            v0 = multiply_add_number(load_number(source, s0 + n), decay, u0 * input_1)
            r0 = multiply_add_number(v0, output_1, r0)
            v1 = multiply_add_number(load_number(source, s1 + n), decay, u1 * input_1)
            r1 = multiply_add_number(v1, output_1, r1)
            v2 = multiply_add_number(load_number(source, s2 + n), decay, u2 * input_1)
            r2 = multiply_add_number(v2, output_1, r2)
            v3 = multiply_add_number(load_number(source, s3 + n), decay, u3 * input_1)
            r3 = multiply_add_number(v3, output_1, r3)
        for n in range(whole, width):
            input_1, e = B[b + n], p * width + n
            v0 = multiply_add_number(load_number(source, s0 + n), decay, u0 * input_1)
            v1 = multiply_add_number(load_number(source, s1 + n), decay, u1 * input_1)
            v2 = multiply_add_number(load_number(source, s2 + n), decay, u2 * input_1)
            v3 = multiply_add_number(load_number(source, s3 + n), decay, u3 * input_1)
            store_number(target, t0 + n, rounded_number(target, v0, by_chance, key, e))
            store_number(target, t1 + n, rounded_number(target, v1, by_chance, key, e + width))
            store_number(target, t2 + n, rounded_number(target, v2, by_chance, key, e + 2 * width))
            store_number(target, t3 + n, rounded_number(target, v3, by_chance, key, e + 3 * width))
        y[out + p], y[out + p + 1] = (
            multiply_add_number(D, x[o + p], r0),
            multiply_add_number(D, x[o + p + 1], r1),
        )
        y[out + p + 2], y[out + p + 3] = (
            multiply_add_number(D, x[o + p + 2], r2),
            multiply_add_number(D, x[o + p + 3], r3),
        )
        p += 4
    while p < num_rows:
        s0, t0, u0, r0 = first + p * stride, target_first + p * target_stride, step * x[o + p], _ZERO
        for n in range(width):
            v0 = multiply_add_number(load_number(source, s0 + n), decay, u0 * B[b + n])
            r0 = multiply_add_number(v0, C[c + n], r0)
        for n in range(width):
            v0 = multiply_add_number(load_number(source, s0 + n), decay, u0 * B[b + n])
            store_number(target, t0 + n, rounded_number(target, v0, by_chance, key, p * width + n))
        y[out + p] = multiply_add_number(D, x[o + p], r0)
        p += 1


@cpu_jit
def _time_step(dt, dt_limit):
    """Return softplus within limits. Uses comparisons, because min() and max() lose a NaN."""
    step = softplus(dt)
    if step < dt_limit[0]:
        return dt_limit[0]
    return dt_limit[1] if step > dt_limit[1] else step


@cpu_jit
def scan_steps(dt, dt_bias, A, dt_limit, step, decay, begin, end):
    """Compute ``step`` and ``decay`` ``[H, n]`` (heads, tokens) of heads ``begin : end`` of a prompt.

    The formulas are those for decode rows. They are computed element by element: torch's vectorized functions
    round the last elements of a tensor in another way, so that a token's bits would depend on the other rows
    of the batch.
    """
    for h in range(begin, end):
        for t in range(dt.shape[0]):
            step[h, t] = _time_step(dt[t, h] + dt_bias[h], dt_limit)
            decay[h, t] = np.float32(math.exp(A[h] * step[h, t]))


@cpu_jit
def update_heads(
    x, x_strides, dt, dt_strides, B, B_strides, C, C_strides, A, D, dt_bias, state, state_strides,
    read_slots, write_slots, seq_lens, rounding, dt_limit, shape, y, begin, end,
):  # fmt: skip
    """Update states. Item ``r * H + h`` stands for all positions of head h of decode row r.

    ``shape`` is T, H, P, G, N as in selective_state_update.py; y is flat.
    """
    by_chance, layer_seed, first_head = rounding
    num_positions, num_heads, head_dim, num_groups, width = shape
    slot_stride, head_stride, row_stride = state_strides
    heads_per_group = num_heads // num_groups
    unwritten = np.empty(head_dim * width, state.dtype)  # stands in for write slot 0
    for item in range(begin, end):
        r, h = item // num_heads, item % num_heads
        g = h // heads_per_group
        memory, offset, row_stride_now = state, read_slots[r] * slot_stride + h * head_stride, row_stride
        for i in range(num_positions):
            out = ((r * num_positions + i) * num_heads + h) * head_dim
            if read_slots[r] == 0:
                y[out : out + head_dim] = _ZERO
                continue
            step = _time_step(dt[r * dt_strides[0] + i * dt_strides[1] + h] + dt_bias[h], dt_limit)
            source, first, stride = memory, offset, row_stride_now
            if write_slots[r, i] == 0:
                memory, offset, row_stride_now = unwritten, 0, width
            else:
                memory, row_stride_now = state, row_stride
                offset = write_slots[r, i] * slot_stride + h * head_stride
            decay = np.float32(math.exp(A[h] * step))
            key = rounding_key(layer_seed, first_head + h, seq_lens[r] - num_positions + i + 1)
            _advance(
                source, first, stride, memory, offset, row_stride_now, decay, step, D[h],
                B, r * B_strides[0] + i * B_strides[1] + g * B_strides[2],
                C, r * C_strides[0] + i * C_strides[1] + g * C_strides[2],
                x, r * x_strides[0] + i * x_strides[1] + h * x_strides[2],
                y, out, head_dim, width, by_chance, key,
            )  # fmt: skip
