"""The SSM recurrence of decode rows on CPU, in place in the pool (``update_heads``).

    h_t = decay_t h_{t-1} + step_t x_t B_t^T,    y_t = h_t C_t + D x_t

A vector's width of rows of a head's ``[P, N]`` state advances by all positions before the next rows do, so
that between two positions these rows stay in the first-level cache. The rows share each load of B and C, and
their sums of h C stay in registers until they are folded together (state_rows.py). A position reads the state
from the slot that the previous position wrote, and writes its own slot. So nothing is copied, and with a
state of 16 bits each position sees the stored values. Rows to come are prefetched, since the core's own
prefetcher does not look so far ahead. Prefill is in ssd_chunk_scan_cpu.py.

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
    rounded_number,
    rounding_key,
    splat,
    store,
    store_number,
)
from kernels.ssm.state_rows import advance_4_rows, advance_rows

_ZERO = np.float32(0)


@cpu_jit
def softplus(v):
    # Like torch: linear above 20, where the difference is below float32's last digit.
    return np.float32(math.log1p(math.exp(v))) if v <= 20.0 else v


@cpu_jit
def advance_tails(
    source, s, stride, target, t, target_stride, decay, gains, B, b, C, c, tails, num_rows, begin, width,
    by_chance, key, element,
):  # fmt: skip
    """Advance the columns from ``begin`` on of num_rows rows. Return a vector of their parts of h C."""
    for p in range(num_rows):
        tails[p] = _advance_numbers(
            source, s + p * stride, target, t + p * target_stride, decay, gains[p], B, b, C, c, begin, width,
            by_chance, key, element + p * width,
        )  # fmt: skip
    return load(tails, 0)


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
def time_step(dt, dt_limit):
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
            step[h, t] = time_step(dt[t, h] + dt_bias[h], dt_limit)
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
    w, heads_per_group, whole = lanes(), num_heads // num_groups, width - width % lanes()
    unwritten = np.empty(w * width, state.dtype)  # stands in for write slot 0
    gains, tails, totals = aligned(w), aligned(w), aligned(w)  # gains are step x
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
            steps[i] = time_step(dt[r * dt_strides[0] + i * dt_strides[1] + h] + dt_bias[h], dt_limit)
            decays[i] = np.float32(math.exp(A[h] * steps[i]))
            keys[i] = rounding_key(layer_seed, first_head + h, seq_lens[r] - num_positions + i + 1)
        p = 0
        while p < head_dim:
            num_rows = w if p + w <= head_dim else (4 if p + 4 <= head_dim else 1)
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
                if num_rows == w:
                    store(gains, 0, multiply(splat(steps[i]), load(x, o)))
                else:
                    for q in range(num_rows):
                        gains[q] = steps[i] * x[o + q]
                f += w * fetched_stride
                begin, hC = whole, splat(_ZERO)
                # Not in a function of its own, which numba might call instead of inlining it.
                if num_rows == w:
                    hC = advance_rows(
                        source, s, stride, target, t, target_stride, fetched, f, fetched_stride, decays[i],
                        gains, B, b, C, c, whole, width, by_chance, keys[i], p * width,
                    )  # fmt: skip
                elif num_rows == 4:
                    hC = advance_4_rows(
                        source, s, stride, target, t, target_stride, fetched, f, fetched_stride, decays[i],
                        gains, B, b, C, c, whole, width, by_chance, keys[i], p * width,
                    )  # fmt: skip
                else:
                    begin = 0
                if begin < width:
                    rest = advance_tails(
                        source, s, stride, target, t, target_stride, decays[i], gains, B, b, C, c, tails,
                        num_rows, begin, width, by_chance, keys[i], p * width,
                    )  # fmt: skip
                    hC = add(hC, rest)
                if num_rows == w:
                    store(y, out, multiply_add(splat(D[h]), load(x, o), hC))
                else:
                    store(totals, 0, hC)
                    for q in range(num_rows):
                        y[out + q] = multiply_add_number(D[h], x[o + q], totals[q])
                source, s, stride = target, t, target_stride
            p += num_rows
