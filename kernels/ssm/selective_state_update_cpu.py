"""The SSM recurrence of decode rows on CPU, in place in the pool (``update_heads``).

    h_t = decay_t h_{t-1} + step_t x_t B_t^T,    y_t = h_t C_t + D x_t

A vector's width of rows of a head's ``[P, N]`` state advances by all positions before the next rows do, so
that between two positions these rows stay in the first-level cache. Four rows at a time are in registers and
share each load of B and C. The sums of h C are folded for all rows together. A position reads the state from
the slot that the previous position wrote, and writes its own slot. So nothing is copied, and with a state of
16 bits each position sees the stored values. Rows to come are prefetched, since the core's own prefetcher
does not look so far ahead. Prefill, which uses a state for many tokens, is in ssd_chunk_scan_cpu.py.

Arrays are flat, with explicit strides if they may be views of wider ones; the last axis is contiguous.
"""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu.jit import cpu_jit
from kernels.cpu.vector import (
    add,
    aligned,
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
    row_sums,
    splat,
    store,
    store_number,
)

_ZERO = np.float32(0)


@cpu_jit
def softplus(v):
    # Like torch: linear above 20, where the difference is below float32's last digit.
    return np.float32(math.log1p(math.exp(v))) if v <= 20.0 else v


@cpu_jit
def _advance(
    source, s, stride, target, t, target_stride, fetched, f, fetched_stride, decay, step, x, o, B, b, C, c,
    sums, tails, num_rows, width, by_chance, key, element,
):  # fmt: skip
    """Advance up to lanes() rows of a state by one token, from source to target, which may be one array.

    Row p of the old state is ``source[s + p * stride :][:width]``; x, B and C begin at o, b and c. Row p of
    h C is the sum of vector p of ``sums`` and of ``tails[p]``. It is computed from the state before it is
    rounded to a target of 16 bits. Rows of ``fetched`` from f on are prefetched. num_rows is a multiple of 4.
    """
    w = lanes()
    whole, decays = width - width % w, splat(decay)
    for p in range(0, num_rows, 4):
        s0, t0, f0 = s + p * stride, t + p * target_stride, f + p * fetched_stride
        s1, t1, f1 = s0 + stride, t0 + target_stride, f0 + fetched_stride
        s2, t2, f2 = s1 + stride, t1 + target_stride, f1 + fetched_stride
        s3, t3, f3 = s2 + stride, t2 + target_stride, f2 + fetched_stride
        u0, u1, u2, u3 = step * x[o + p], step * x[o + p + 1], step * x[o + p + 2], step * x[o + p + 3]
        a0, a1, a2, a3 = splat(u0), splat(u1), splat(u2), splat(u3)
        y0, y1, y2, y3 = splat(_ZERO), splat(_ZERO), splat(_ZERO), splat(_ZERO)
        for n in range(0, whole, w):
            input_n, output_n = load(B, b + n), load(C, c + n)
            prefetch(fetched, f0 + n)
            prefetch(fetched, f1 + n)
            prefetch(fetched, f2 + n)
            prefetch(fetched, f3 + n)
            h0 = multiply_add(load(source, s0 + n), decays, multiply(a0, input_n))
            h1 = multiply_add(load(source, s1 + n), decays, multiply(a1, input_n))
            h2 = multiply_add(load(source, s2 + n), decays, multiply(a2, input_n))
            h3 = multiply_add(load(source, s3 + n), decays, multiply(a3, input_n))
            e = element + p * width + n
            store(target, t0 + n, rounded(target, h0, by_chance, key, e, 1))
            store(target, t1 + n, rounded(target, h1, by_chance, key, e + width, 1))
            store(target, t2 + n, rounded(target, h2, by_chance, key, e + 2 * width, 1))
            store(target, t3 + n, rounded(target, h3, by_chance, key, e + 3 * width, 1))
            y0, y1 = multiply_add(h0, output_n, y0), multiply_add(h1, output_n, y1)
            y2, y3 = multiply_add(h2, output_n, y2), multiply_add(h3, output_n, y3)
        store(sums, p * w, y0)
        store(sums, (p + 1) * w, y1)
        store(sums, (p + 2) * w, y2)
        store(sums, (p + 3) * w, y3)
    if whole < width:
        for p in range(num_rows):
            tails[p] = _advance_numbers(
                source, s + p * stride, target, t + p * target_stride, decay, step * x[o + p], B, b, C, c,
                whole, width, by_chance, key, element + p * width,
            )  # fmt: skip


@cpu_jit
def _advance_numbers(
    source, s, target, t, decay, u, B, b, C, c, begin, width, by_chance, key, element
):  # fmt: skip
    """Advance elements ``begin : width`` of one row; return their part of h C."""
    total = _ZERO
    # These two loops are not one: if a loop over single numbers also stored, the compiler would choose the
    # order of its sums by whether source is target.
    for n in range(begin, width):
        h = multiply_add_number(load_number(source, s + n), decay, u * B[b + n])
        total = multiply_add_number(h, C[c + n], total)
    for n in range(begin, width):
        h = multiply_add_number(load_number(source, s + n), decay, u * B[b + n])
        store_number(target, t + n, rounded_number(target, h, by_chance, key, element + n))
    return total


@cpu_jit
def _finish(sums, tails, num_rows, D, x, o, y, out):
    """Compute ``y = h C + D x`` of up to lanes() rows."""
    totals = add(row_sums(sums, 0), load(tails, 0))
    if num_rows == lanes():
        store(y, out, multiply_add(splat(D), load(x, o), totals))
        return
    store(sums, 0, totals)
    for p in range(num_rows):
        y[out + p] = multiply_add_number(D, x[o + p], sums[p])


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
    w, heads_per_group = lanes(), num_heads // num_groups
    unwritten = np.empty(w * width, state.dtype)  # stands in for write slot 0
    sums, tails = aligned(w * w), aligned(w)
    sums[:], tails[:] = _ZERO, _ZERO
    steps, decays = np.empty(num_positions, np.float32), np.empty(num_positions, np.float32)
    keys = np.empty(num_positions, np.int64)
    for item in range(begin, end):
        r, h = item // num_heads, item % num_heads
        g = h // heads_per_group
        row_out = (r * num_positions * num_heads + h) * head_dim
        if read_slots[r] == 0:
            for i in range(num_positions):
                out = row_out + i * num_heads * head_dim
                y[out : out + head_dim] = _ZERO
            continue
        for i in range(num_positions):
            steps[i] = _time_step(dt[r * dt_strides[0] + i * dt_strides[1] + h] + dt_bias[h], dt_limit)
            decays[i] = np.float32(math.exp(A[h] * steps[i]))
            keys[i] = rounding_key(layer_seed, first_head + h, seq_lens[r] - num_positions + i + 1)
        for p in range(0, head_dim, w):
            num_rows = min(w, head_dim - p)
            inside = h * head_stride + p * row_stride
            source, s, stride = state, read_slots[r] * slot_stride + inside, row_stride
            for i in range(num_positions):
                target, t, target_stride = unwritten, 0, width
                fetched, f, fetched_stride = source, s, stride
                if write_slots[r, i] != 0:
                    target, t, target_stride = state, write_slots[r, i] * slot_stride + inside, row_stride
                    fetched, f, fetched_stride = target, t, target_stride
                b = r * B_strides[0] + i * B_strides[1] + g * B_strides[2]
                c = r * C_strides[0] + i * C_strides[1] + g * C_strides[2]
                o = r * x_strides[0] + i * x_strides[1] + h * x_strides[2] + p
                out = row_out + i * num_heads * head_dim + p
                whole = num_rows - num_rows % 4
                _advance(
                    source, s, stride, target, t, target_stride, fetched, f + w * fetched_stride,
                    fetched_stride, decays[i], steps[i], x, o, B, b, C, c, sums, tails, whole, width,
                    by_chance, keys[i], p * width,
                )  # fmt: skip
                _finish(sums, tails, whole, D[h], x, o, y, out)
                for q in range(whole, num_rows):
                    total = _advance_numbers(
                        source, s + q * stride, target, t + q * target_stride, decays[i],
                        steps[i] * x[o + q], B, b, C, c, 0, width, by_chance, keys[i], (p + q) * width,
                    )  # fmt: skip
                    y[out + q] = multiply_add_number(D[h], x[o + q], total)
                source, s, stride = target, t, target_stride
