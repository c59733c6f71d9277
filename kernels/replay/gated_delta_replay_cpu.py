"""The replay form of the gated delta rule on CPU (``replay_heads``), which is its flush too.

Half a vector's width of a head's rows advances by the row's pending tokens and is stored, then runs the
positions in a buffer that stays in the first-level cache. Each token is computed by the functions of the
slots form (kernels/gated_delta/gated_delta_update_cpu.py), so that the bits are the same.

Arrays are flat, with explicit strides if they may be views of wider ones; the last axis is contiguous.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.jit import cpu_jit
from kernels.cpu.vector import add, aligned, lanes, rounding_key, splat, store
from kernels.gated_delta.gated_delta_update_cpu import (
    ROWS_AHEAD,
    advance_row,
    dot,
    gates,
    normalize,
    read_tails,
    update_tails,
)
from kernels.ssm.state_rows import read_half, solve_half, update_and_read_half, update_half

_ZERO, _ONE = np.float32(0), np.float32(1)


@cpu_jit
def replay_heads(
    q, q_strides, k, k_strides, v, v_strides, a, a_strides, b, b_strides, A, dt_bias, state, state_strides,
    read_slots, write_slots, seq_lens, rounding, scale, shape, kept, pending, y, begin, end,
):  # fmt: skip
    """Advance states by pending tokens and store them, then run positions. Item ``r * Hv + h`` stands for
    value head h of row r.

    ``shape`` is T, Hk, Dk, Hv, Dv as in gated_delta_update.py; y is flat. Queries are normalized to the
    length ``scale``. ``kept`` is k, v and gates as in gated_delta_flush.py, each flat. ``pending`` is each
    row's row in them, its number of pending tokens, and the places of a row. A flush has no positions.
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
    tokens = np.empty(most, np.int64)  # their places among the kept inputs
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
        count = counts[r]
        num_before, num_tokens = seq_lens[r] - num_positions - count, count + num_positions
        if num_tokens == 0:
            continue
        for j in range(num_tokens):
            at, i = j * width, j - count  # i is negative: a pending token
            rounding_keys[j] = rounding_key(layer_seed, first_head + h, num_before + j + 1)
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
                sums = read_half(source, s, stride, ROWS_AHEAD * stride, keys, queries, 0, whole)
            for j in range(num_tokens):
                i = j - count
                target, t, target_stride = unwritten, 0, width
                if j + 1 == count and write_slots[r] != 0:
                    target, t, target_stride = state, write_slots[r] * slot_stride + inside, row_stride
                at, vs, o = j * width, v, r * v_strides[0] + i * v_strides[1] + h * v_strides[2] + p
                ys, out = y, row_out + i * num_heads * head_dim + p
                if i < 0:
                    vs, o = kept_v, (tokens[j] * num_heads + h) * head_dim + p
                    ys, out = ignored, 0
                if num_rows == 1:
                    advance_row(
                        source, s, target, t, decay[j], beta[j], kq[j], keys, queries, at, vs[o], ys, out,
                        width, by_chance, rounding_keys[j], p * width,
                    )  # fmt: skip
                else:
                    if whole < width:
                        rest = read_tails(source, s, stride, keys, queries, at, whole, width, tails)
                        sums = add(sums, rest)
                    u = solve_half(sums, decay[j], beta[j], kq[j], vs, o, ys, out)
                    ahead = ROWS_AHEAD * target_stride
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
                        update_tails(
                            source, s, stride, target, t, target_stride, decay[j], changes, keys, at, whole,
                            width, by_chance, rounding_keys[j], p * width,
                        )  # fmt: skip
                source, s, stride = target, t, target_stride
            p += num_rows
