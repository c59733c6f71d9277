"""The gated delta rule of decode rows on CPU, in place in the pool (``update_heads``).

    r = decay S_{t-1} k_t,    S_t = decay S_{t-1} + beta (v_t - r) k_t^T,    o_t = S_t q_t

The rows of S, one per value channel, don't depend on each other. So half a vector's width of them advances by
all positions before the next ones do. The first position reads the rows once to compute ``S k`` and ``S q``;
their sums stay in registers until they are folded together (state_rows.py). From these follow the changes of
the rows, ``u = beta (v - r)``, and the outputs, ``o = decay S q + u (k q)``. While a position then updates
the rows, it computes the next position's sums from what it stores. So nothing is copied, and with a state of
16 bits each position sees the stored values. Prefill is in gated_delta_chunk_cpu.py.

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
    rounded_number,
    rounding_key,
    splat,
    store,
    store_number,
    sum_of,
)
from kernels.ssm.selective_state_update_cpu import softplus
from kernels.ssm.state_rows import read_half, solve_half, update_and_read_half, update_half

NORM_EPS = 1e-6
"""Added to the sum of squares when q and k are normalized to length one."""

_EPS, _ZERO, _ONE = np.float32(NORM_EPS), np.float32(0), np.float32(1)
ROWS_AHEAD = 16  # distance of prefetches in rows: the core's own prefetcher does not look so far ahead


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
def advance_row(
    source, s, target, t, decay, beta, kq, keys, queries, at, v, y, out, width, by_chance, key, element
):  # fmt: skip
    """Advance one row of a state by one token, number by number, if there are too few rows for vectors."""
    change = beta * (v - decay * dot(source, s, keys, at, width))
    y[out] = decay * dot(source, s, queries, at, width) + change * kq
    for n in range(width):
        h = load_number(source, s + n) * decay + change * keys[at + n]
        store_number(target, t + n, rounded_number(target, h, by_chance, key, element + n))


@cpu_jit
def read_tails(source, s, stride, keys, queries, at, begin, width, tails):
    """Return what columns from ``begin`` on add to :func:`read_half`."""
    half = lanes() // 2
    for p in range(half):
        m, o = _ZERO, _ZERO
        for n in range(begin, width):
            h = load_number(source, s + p * stride + n)
            m, o = m + h * keys[at + n], o + h * queries[at + n]
        tails[p], tails[half + p] = m, o
    return load(tails, 0)


@cpu_jit
def update_tails(
    source, s, stride, target, t, target_stride, decay, changes, keys, at, begin, width, by_chance, key,
    element,
):  # fmt: skip
    """Update the columns from ``begin`` on of as many rows as :func:`update_half` does."""
    for p in range(lanes() // 2):
        for n in range(begin, width):
            h = load_number(source, s + p * stride + n) * decay + changes[p] * keys[at + n]
            h = rounded_number(target, h, by_chance, key, element + p * width + n)
            store_number(target, t + p * target_stride + n, h)


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
    half, whole = lanes() // 2, width - width % lanes()
    keys, queries = aligned(num_positions * width), aligned(num_positions * width)
    decay, beta = np.empty(num_positions, np.float32), np.empty(num_positions, np.float32)
    kq, rounding_keys = np.empty(num_positions, np.float32), np.empty(num_positions, np.int64)
    tails, changes = aligned(lanes()), aligned(lanes())
    unwritten = np.empty(half * width, state.dtype)  # stands in for write slot 0
    normalized = -1  # row and key head of ``keys`` and ``queries``
    for item in range(begin, end):
        r, h = item // num_heads, item % num_heads
        g = h // (num_heads // num_key_heads)
        row_out = (r * num_positions * num_heads + h) * head_dim
        if read_slots[r] == 0:
            for i in range(num_positions):
                out = row_out + i * num_heads * head_dim
                y[out : out + head_dim] = _ZERO
            continue
        for i in range(num_positions):
            at = i * width
            if normalized != r * num_key_heads + g:
                normalize(k, r * k_strides[0] + i * k_strides[1] + g * k_strides[2], width, _ONE, keys, at)
                normalize(
                    q, r * q_strides[0] + i * q_strides[1] + g * q_strides[2], width, scale, queries, at
                )
                kq[i] = dot(keys, at, queries, at, width)
            a_i, b_i = a[r * a_strides[0] + i * a_strides[1] + h], b[r * b_strides[0] + i * b_strides[1] + h]
            decay[i], beta[i] = gates(a_i, b_i, A[h], dt_bias[h])
            rounding_keys[i] = rounding_key(layer_seed, first_head + h, seq_lens[r] - num_positions + i + 1)
        normalized = r * num_key_heads + g
        p = 0
        while p < head_dim:
            num_rows = half if p + half <= head_dim else 1
            inside = h * head_stride + p * row_stride
            source, s, stride = state, read_slots[r] * slot_stride + inside, row_stride
            sums = splat(_ZERO)
            if num_rows == half:
                sums = read_half(source, s, stride, ROWS_AHEAD * stride, keys, queries, 0, whole)
            for i in range(num_positions):
                target, t, target_stride = unwritten, 0, width
                if write_slots[r, i] != 0:
                    target, t, target_stride = state, write_slots[r, i] * slot_stride + inside, row_stride
                at, o = i * width, r * v_strides[0] + i * v_strides[1] + h * v_strides[2] + p
                out = row_out + i * num_heads * head_dim + p
                if num_rows == 1:
                    advance_row(
                        source, s, target, t, decay[i], beta[i], kq[i], keys, queries, at, v[o], y, out,
                        width, by_chance, rounding_keys[i], p * width,
                    )  # fmt: skip
                else:
                    if whole < width:
                        rest = read_tails(source, s, stride, keys, queries, at, whole, width, tails)
                        sums = add(sums, rest)
                    u = solve_half(sums, decay[i], beta[i], kq[i], v, o, y, out)
                    ahead = ROWS_AHEAD * target_stride
                    if i + 1 < num_positions:
                        sums = update_and_read_half(
                            source, s, stride, target, t, target_stride, ahead, decay[i], u, keys, queries,
                            at, at + width, whole, width, by_chance, rounding_keys[i], p * width,
                        )  # fmt: skip
                    else:
                        update_half(
                            source, s, stride, target, t, target_stride, ahead, decay[i], u, keys, at, whole,
                            width, by_chance, rounding_keys[i], p * width,
                        )  # fmt: skip
                    if whole < width:
                        store(changes, 0, u)
                        update_tails(
                            source, s, stride, target, t, target_stride, decay[i], changes, keys, at, whole,
                            width, by_chance, rounding_keys[i], p * width,
                        )  # fmt: skip
                source, s, stride = target, t, target_stride
            p += num_rows
