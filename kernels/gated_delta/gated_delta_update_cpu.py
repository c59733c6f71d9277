"""The gated delta rule of decode rows on CPU, in place in the pool (``update_heads``).

    r = decay S_{t-1} k_t,    S_t = decay S_{t-1} + beta (v_t - r) k_t^T,    o_t = S_t q_t

The rows of S, one per value channel, don't depend on each other. So half a vector's width of them advances by
all positions before the next ones do. The first position reads the rows once to compute ``S k`` and ``S q``;
their sums stay in registers until they are folded together (state_rows.py). From these follow the changes of
the rows, ``u = beta (v - r)``, and the outputs, ``o = decay S q + u (k q)``. While a position then updates
the rows, it computes the next position's sums from what it stores. So nothing is copied, and with a state of
16 bits each position sees the stored values. Prefill is in gated_delta_chunk_cpu.py.

The replay form (kernels/replay/kept_inputs.py) is the same compiled code: a row's pending tokens come before
its positions, and the state after the last pending token is the only one that is stored.

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
def _advance_row(
    source, s, target, t, decay, beta, kq, keys, queries, at, v, y, out, width, by_chance, key, element
):  # fmt: skip
    """Advance one row of a state by one token, number by number, if there are too few rows for vectors."""
    change = beta * (v - decay * dot(source, s, keys, at, width))
    y[out] = decay * dot(source, s, queries, at, width) + change * kq
    for n in range(width):
        h = load_number(source, s + n) * decay + change * keys[at + n]
        store_number(target, t + n, rounded_number(target, h, by_chance, key, element + n))


@cpu_jit
def _read_tails(source, s, stride, keys, queries, at, begin, width, tails):
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
def _update_tails(
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
    read_slots, write_slots, seq_lens, rounding, scale, shape, kept, pending, y, begin, end,
):  # fmt: skip
    """Update states. Item ``r * Hv + h`` stands for all positions of value head h of decode row r.

    ``shape`` is T, Hk, Dk, Hv, Dv as in gated_delta_update.py; y is flat. Queries are normalized to the
    length ``scale``. ``kept`` is k, v and gates as in gated_delta_flush.py, each flat. ``pending`` is each
    row's row in them, its number of pending tokens, and the places of a row. Without places nothing is
    pending or kept, and write_slots is ``[R, T]``. Else it is ``[R, 1]``.
    """
    kept_k, kept_v, kept_gates = kept
    kept_rows, counts, places = pending
    num_positions, num_key_heads, width, num_heads, head_dim = shape
    most = num_positions + places
    slot_stride, head_stride, row_stride = state_strides
    by_chance, layer_seed, first_head = rounding
    half, whole = lanes() // 2, width - width % lanes()
    keys, queries = aligned(most * width), aligned(most * width)
    decay, beta = np.empty(most, np.float32), np.empty(most, np.float32)
    kq, rounding_keys = np.empty(most, np.float32), np.empty(most, np.int64)
    tokens = np.empty(most, np.int64)  # their places among the kept inputs, if any
    tails, changes, ignored = aligned(lanes()), aligned(lanes()), aligned(lanes())
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
        count = counts[r] if places > 0 else 0
        num_before, num_tokens = seq_lens[r] - num_positions - count, count + num_positions
        if num_tokens == 0:
            continue
        for j in range(num_tokens):
            at, i = j * width, j - count  # i is negative: a pending token
            rounding_keys[j] = rounding_key(layer_seed, first_head + h, num_before + j + 1)
            if places > 0:
                tokens[j] = kept_rows[r] * places + (num_before + j) % places
            if i < 0:
                gate = 2 * (tokens[j] * num_heads + h)
                decay[j], beta[j] = kept_gates[gate], kept_gates[gate + 1]
                if normalized != r * num_key_heads + g:
                    kq[j] = _ZERO  # q is not kept, and nobody reads the output
                    for n in range(width):
                        keys[at + n] = kept_k[(tokens[j] * num_key_heads + g) * width + n]
                        queries[at + n] = _ZERO
                continue
            if normalized != r * num_key_heads + g:
                normalize(k, r * k_strides[0] + i * k_strides[1] + g * k_strides[2], width, _ONE, keys, at)
                normalize(
                    q, r * q_strides[0] + i * q_strides[1] + g * q_strides[2], width, scale, queries, at
                )
                kq[j] = dot(keys, at, queries, at, width)
            a_i, b_i = a[r * a_strides[0] + i * a_strides[1] + h], b[r * b_strides[0] + i * b_strides[1] + h]
            decay[j], beta[j] = gates(a_i, b_i, A[h], dt_bias[h])
            if places > 0:
                kept_at = tokens[j] * num_heads + h
                kept_gates[2 * kept_at], kept_gates[2 * kept_at + 1] = decay[j], beta[j]
                o = r * v_strides[0] + i * v_strides[1] + h * v_strides[2]
                for p in range(head_dim):
                    kept_v[kept_at * head_dim + p] = v[o + p]
                if h % (num_heads // num_key_heads) == 0:
                    for n in range(width):
                        kept_k[(tokens[j] * num_key_heads + g) * width + n] = keys[at + n]
        normalized = r * num_key_heads + g
        p = 0
        while p < head_dim:
            num_rows = half if p + half <= head_dim else 1
            inside = h * head_stride + p * row_stride
            source, s, stride = state, read_slots[r] * slot_stride + inside, row_stride
            sums = splat(_ZERO)
            if num_rows == half:
                sums = read_half(source, s, stride, _ROWS_AHEAD * stride, keys, queries, 0, whole)
            for j in range(num_tokens):
                i, slot = j - count, 0
                if places == 0:
                    slot = write_slots[r, j]
                elif j + 1 == count:
                    slot = write_slots[r, 0]
                target, t, target_stride = unwritten, 0, width
                if slot != 0:
                    target, t, target_stride = state, slot * slot_stride + inside, row_stride
                at, vs, o = j * width, v, r * v_strides[0] + i * v_strides[1] + h * v_strides[2] + p
                ys, out = y, row_out + i * num_heads * head_dim + p
                if i < 0:
                    vs, o = kept_v, (tokens[j] * num_heads + h) * head_dim + p
                    ys, out = ignored, 0
                if num_rows == 1:
                    _advance_row(
                        source, s, target, t, decay[j], beta[j], kq[j], keys, queries, at, vs[o], ys, out,
                        width, by_chance, rounding_keys[j], p * width,
                    )  # fmt: skip
                else:
                    if whole < width:
                        rest = _read_tails(source, s, stride, keys, queries, at, whole, width, tails)
                        sums = add(sums, rest)
                    u = solve_half(sums, decay[j], beta[j], kq[j], vs, o, ys, out)
                    ahead = _ROWS_AHEAD * target_stride
                    if j + 1 < num_tokens:
                        sums = update_and_read_half(
                            source, s, stride, target, t, target_stride, ahead, decay[j], u, keys, queries,
                            at, at + width, whole, width, by_chance, rounding_keys[j], p * width,
                        )  # fmt: skip
                    else:
                        update_half(
                            source, s, stride, target, t, target_stride, ahead, decay[j], u, keys, at, whole,
                            width, by_chance, rounding_keys[j], p * width,
                        )  # fmt: skip
                    if whole < width:
                        store(changes, 0, u)
                        _update_tails(
                            source, s, stride, target, t, target_stride, decay[j], changes, keys, at, whole,
                            width, by_chance, rounding_keys[j], p * width,
                        )  # fmt: skip
                source, s, stride = target, t, target_stride
            p += num_rows
