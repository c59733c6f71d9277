"""The gated delta rule of decode rows on CPU, in place in the pool (``update_heads``).

    r = decay S_{t-1} k_t,    S_t = decay S_{t-1} + beta (v_t - r) k_t^T,    o_t = S_t q_t

The rows of S, one per value channel, don't depend on each other. So 32 rows of S stay in the first-level
cache while all positions of a decode row are computed for them; four of these rows at a time are in vector
registers. One pass over the rows gives ``S k`` and ``S q``, a second pass updates them, and no third pass is
needed for ``o = decay S q + beta (v - r) (k q)``. A position reads the state from the slot that the previous
position wrote, and writes its own slot. So nothing is copied, and with a state of 16 bits each position sees
the stored values. Prefill is in gated_delta_chunk_cpu.py.

Arrays are flat, with explicit strides if they may be views of wider ones; the last axis is contiguous.
"""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu.jit import cpu_jit
from kernels.cpu.vector import (
    aligned,
    lanes,
    load,
    load_number,
    multiply,
    multiply_add,
    prefetch,
    rounded,
    rounded_number,
    rounding_key,
    splat,
    store,
    store_number,
    sum_of,
)
from kernels.ssm.selective_state_update_cpu import softplus

NORM_EPS = 1e-6
"""Added to the sum of squares when q and k are normalized to length one."""

_EPS, _ZERO, _ONE = np.float32(NORM_EPS), np.float32(0), np.float32(1)
_ROWS = 32  # rows of a state computed together for all positions: 32 KB for old and new state, at 128 columns
_ROWS_AHEAD = 16  # distance of prefetches in rows: the core's own prefetcher does not look so far ahead


@cpu_jit
def gates(a, b, A, dt_bias):
    """Return a token's decay and write strength for one head."""
    decay = np.float32(math.exp(A * softplus(a + dt_bias)))
    return decay, np.float32(_ONE / (_ONE + np.float32(math.exp(-b))))


@cpu_jit
def normalize(source, s, width, scale, target, t):
    """Write ``source[s:]``, normalized to length ``scale``, to ``target[t:]``."""
    whole, sums = width - width % lanes(), splat(_ZERO)
    for n in range(0, whole, lanes()):
        x = load(source, s + n)
        sums = multiply_add(x, x, sums)
    squares = sum_of(sums)
    for n in range(whole, width):
        squares += source[s + n] * source[s + n]
    factor = np.float32(scale / np.sqrt(squares + _EPS))
    for n in range(0, whole, lanes()):
        store(target, t + n, multiply(load(source, s + n), splat(factor)))
    for n in range(whole, width):
        target[t + n] = source[s + n] * factor


@cpu_jit
def dot(x, i, y, j, width):
    """Return the dot product of ``x[i:]`` and ``y[j:]``."""
    whole, sums = width - width % lanes(), splat(_ZERO)
    for n in range(0, whole, lanes()):
        sums = multiply_add(load(x, i + n), load(y, j + n), sums)
    total = sum_of(sums)
    for n in range(whole, width):
        total += load_number(x, i + n) * y[j + n]
    return total


@cpu_jit
def _advance(
    source, first, stride, target, target_first, target_stride, decay, beta, kq, k, q, at, v, o, y, out,
    num_rows, width, by_chance, key, place,
):  # fmt: skip
    """Advance a head's state by one token, from source to target, which may be the same array.

    Row p of the old state is ``source[first + p * stride :][:width]``. Keys and queries begin at index
    ``at``, values at ``v[o]``, outputs at ``y[out]``. Outputs are computed from the state before it is
    rounded to a target of 16 bits. ``place`` is the index of the first element within the head's state.
    """
    whole, decays, ahead = width - width % lanes(), splat(decay), _ROWS_AHEAD * stride
    p = 0
    while p + 4 <= num_rows:
        s0, t0 = first + p * stride, target_first + p * target_stride
        s1, t1 = s0 + stride, t0 + target_stride
        s2, t2 = s1 + stride, t1 + target_stride
        s3, t3 = s2 + stride, t2 + target_stride
        zero = splat(_ZERO)
        r0, r1, r2, r3, o0, o1, o2, o3 = zero, zero, zero, zero, zero, zero, zero, zero
        for n in range(0, whole, lanes()):
            k_n, q_n = load(k, at + n), load(q, at + n)
            prefetch(source, s0 + ahead + n)
            prefetch(source, s1 + ahead + n)
            prefetch(source, s2 + ahead + n)
            prefetch(source, s3 + ahead + n)
            h0, h1 = load(source, s0 + n), load(source, s1 + n)
            h2, h3 = load(source, s2 + n), load(source, s3 + n)
            r0, r1 = multiply_add(h0, k_n, r0), multiply_add(h1, k_n, r1)
            r2, r3 = multiply_add(h2, k_n, r2), multiply_add(h3, k_n, r3)
            o0, o1 = multiply_add(h0, q_n, o0), multiply_add(h1, q_n, o1)
            o2, o3 = multiply_add(h2, q_n, o2), multiply_add(h3, q_n, o3)
        m0, m1, m2, m3 = sum_of(r0), sum_of(r1), sum_of(r2), sum_of(r3)
        y0, y1, y2, y3 = sum_of(o0), sum_of(o1), sum_of(o2), sum_of(o3)
        for n in range(whole, width):
            k_1, q_1 = k[at + n], q[at + n]
            v0, v1 = load_number(source, s0 + n), load_number(source, s1 + n)
            v2, v3 = load_number(source, s2 + n), load_number(source, s3 + n)
            m0, m1, m2, m3 = m0 + v0 * k_1, m1 + v1 * k_1, m2 + v2 * k_1, m3 + v3 * k_1
            y0, y1, y2, y3 = y0 + v0 * q_1, y1 + v1 * q_1, y2 + v2 * q_1, y3 + v3 * q_1
        d0, d1 = beta * (v[o + p] - decay * m0), beta * (v[o + p + 1] - decay * m1)
        d2, d3 = beta * (v[o + p + 2] - decay * m2), beta * (v[o + p + 3] - decay * m3)
        y[out + p], y[out + p + 1] = decay * y0 + d0 * kq, decay * y1 + d1 * kq
        y[out + p + 2], y[out + p + 3] = decay * y2 + d2 * kq, decay * y3 + d3 * kq
        a0, a1, a2, a3 = splat(d0), splat(d1), splat(d2), splat(d3)
        for n in range(0, whole, lanes()):
            k_n, e = load(k, at + n), place + p * width + n
            h0 = multiply_add(a0, k_n, multiply(load(source, s0 + n), decays))
            store(target, t0 + n, rounded(target, h0, by_chance, key, e, 1))
            h1 = multiply_add(a1, k_n, multiply(load(source, s1 + n), decays))
            store(target, t1 + n, rounded(target, h1, by_chance, key, e + width, 1))
            h2 = multiply_add(a2, k_n, multiply(load(source, s2 + n), decays))
            store(target, t2 + n, rounded(target, h2, by_chance, key, e + 2 * width, 1))
            h3 = multiply_add(a3, k_n, multiply(load(source, s3 + n), decays))
            store(target, t3 + n, rounded(target, h3, by_chance, key, e + 3 * width, 1))
        for n in range(whole, width):
            k_1 = k[at + n]
            v0, v1 = load_number(source, s0 + n), load_number(source, s1 + n)
            v2, v3 = load_number(source, s2 + n), load_number(source, s3 + n)
            e = place + p * width + n
            v0, v1, v2, v3 = (
                v0 * decay + d0 * k_1,
                v1 * decay + d1 * k_1,
                v2 * decay + d2 * k_1,
                v3 * decay + d3 * k_1,
            )
            store_number(target, t0 + n, rounded_number(target, v0, by_chance, key, e))
            store_number(target, t1 + n, rounded_number(target, v1, by_chance, key, e + width))
            store_number(target, t2 + n, rounded_number(target, v2, by_chance, key, e + 2 * width))
            store_number(target, t3 + n, rounded_number(target, v3, by_chance, key, e + 3 * width))
        p += 4
    while p < num_rows:
        s0, t0 = first + p * stride, target_first + p * target_stride
        d0 = beta * (v[o + p] - decay * dot(source, s0, k, at, width))
        y[out + p] = decay * dot(source, s0, q, at, width) + d0 * kq
        for n in range(width):
            v0, e = load_number(source, s0 + n) * decay + d0 * k[at + n], place + p * width + n
            store_number(target, t0 + n, rounded_number(target, v0, by_chance, key, e))
        p += 1


@cpu_jit
def update_heads(
    q, q_strides, k, k_strides, v, v_strides, a, a_strides, b, b_strides, A, dt_bias, state, state_strides,
    read_slots, write_slots, seq_lens, rounding, scale, shape, y, begin, end,
):  # fmt: skip
    """Update states. Item ``r * Hv + h`` stands for all positions of value head h of decode row r.

    ``shape`` is T, Hk, Dk, Hv, Dv as in gated_delta_update.py; y is flat. Queries are normalized to the
    length ``scale``.
    """
    num_positions, num_key_heads, width, num_heads, head_dim = shape
    slot_stride, head_stride, row_stride = state_strides
    by_chance, layer_seed, first_head = rounding
    keys, queries = aligned(num_positions * width), aligned(num_positions * width)
    decay, beta = np.empty(num_positions, np.float32), np.empty(num_positions, np.float32)
    kq = np.empty(num_positions, np.float32)
    unwritten = np.empty(_ROWS * width, state.dtype)  # stands in for write slot 0
    for item in range(begin, end):
        r, h = item // num_heads, item % num_heads
        g = h // (num_heads // num_key_heads)
        out = (r * num_positions * num_heads + h) * head_dim
        if read_slots[r] == 0:
            for i in range(num_positions):
                y[out + i * num_heads * head_dim : out + (i * num_heads + 1) * head_dim] = _ZERO
            continue
        for i in range(num_positions):
            at = i * width
            normalize(k, r * k_strides[0] + i * k_strides[1] + g * k_strides[2], width, _ONE, keys, at)
            normalize(q, r * q_strides[0] + i * q_strides[1] + g * q_strides[2], width, scale, queries, at)
            kq[i] = dot(keys, at, queries, at, width)
            a_i, b_i = a[r * a_strides[0] + i * a_strides[1] + h], b[r * b_strides[0] + i * b_strides[1] + h]
            decay[i], beta[i] = gates(a_i, b_i, A[h], dt_bias[h])
        for p in range(0, head_dim, _ROWS):
            place = h * head_stride + p * row_stride
            memory, first, stride = state, read_slots[r] * slot_stride + place, row_stride
            for i in range(num_positions):
                source, source_first, source_stride = memory, first, stride
                if write_slots[r, i] == 0:
                    memory, first, stride = unwritten, 0, width
                else:
                    memory, first, stride = state, write_slots[r, i] * slot_stride + place, row_stride
                position = seq_lens[r] - num_positions + i + 1
                _advance(
                    source, source_first, source_stride, memory, first, stride, decay[i], beta[i], kq[i],
                    keys, queries, i * width,
                    v, r * v_strides[0] + i * v_strides[1] + h * v_strides[2] + p,
                    y, out + i * num_heads * head_dim + p, min(_ROWS, head_dim - p), width,
                    by_chance, rounding_key(layer_seed, first_head + h, position), p * width,
                )  # fmt: skip
