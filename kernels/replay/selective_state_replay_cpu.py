"""The replay form of the SSM recurrence on CPU (``replay_heads``), which is its flush too.

A vector's width of rows of a head's state advances by the row's pending tokens and is stored, then runs the
positions in a buffer that stays in the first-level cache. Each token is computed by the functions of the
slots form (kernels/ssm/selective_state_update_cpu.py), so that the bits are the same.

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
    multiply,
    multiply_add,
    multiply_add_number,
    rounding_key,
    splat,
    store,
)
from kernels.ssm.selective_state_update_cpu import advance_tails, time_step
from kernels.ssm.state_rows import advance_4_rows, advance_rows

_ZERO = np.float32(0)


@cpu_jit
def _recall_head(
    r, h, x, x_strides, dt, dt_strides, B, B_strides, A, dt_bias, kept, first_place, places, count,
    num_before, rounding, dt_limit, shape, steps, decays, keys, tokens,
):  # fmt: skip
    """Set ``steps``, ``decays``, ``keys`` and the places ``tokens`` of a head's pending tokens and positions.

    Keep the positions' inputs. ``num_before`` tokens come before the first pending one.
    """
    kept_x, kept_gates, kept_B = kept
    _, layer_seed, first_head = rounding
    num_positions, num_heads, head_dim, num_groups, width = shape
    g = h // (num_heads // num_groups)
    for j in range(count + num_positions):
        tokens[j] = first_place + (num_before + j) % places
        keys[j] = rounding_key(layer_seed, first_head + h, num_before + j + 1)
    for j in range(count):
        at = 2 * (tokens[j] * num_heads + h)
        decays[j], steps[j] = kept_gates[at], kept_gates[at + 1]
    for i in range(num_positions):
        j = count + i
        at, o = tokens[j] * num_heads + h, r * x_strides[0] + i * x_strides[1] + h * x_strides[2]
        b, kept_b = r * B_strides[0] + i * B_strides[1] + g * B_strides[2], tokens[j] * num_groups + g
        steps[j] = time_step(dt[r * dt_strides[0] + i * dt_strides[1] + h] + dt_bias[h], dt_limit)
        decays[j] = np.float32(math.exp(A[h] * steps[j]))
        kept_gates[2 * at], kept_gates[2 * at + 1] = decays[j], steps[j]
        for p in range(head_dim):
            kept_x[at * head_dim + p] = x[o + p]
        if h % (num_heads // num_groups) == 0:
            for n in range(width):
                kept_B[kept_b * width + n] = B[b + n]


@cpu_jit
def _advance_pending(
    source, s, stride, state, t, slot, unwritten, kept, tokens, count, steps, decays, keys, by_chance, h, g,
    p, num_rows, shape, gains, tails,
):  # fmt: skip
    """Advance num_rows rows of a state by its pending tokens. Store them from ``state[t]`` on, or to
    ``unwritten`` if the slot is 0."""
    kept_x, _, kept_B = kept
    _, num_heads, head_dim, num_groups, width = shape
    row_stride, whole = stride, width - width % lanes()
    for j in range(count):
        target, at, target_stride = unwritten, 0, width
        if j + 1 == count and slot != 0:
            target, at, target_stride = state, t, row_stride
        b, o = (tokens[j] * num_groups + g) * width, (tokens[j] * num_heads + h) * head_dim + p
        for q in range(num_rows):
            gains[q] = steps[j] * kept_x[o + q]
        f, begin = s + lanes() * stride, whole
        # C is not kept; B stands in for it, and nobody uses the outputs.
        if num_rows == lanes():
            advance_rows(
                source, s, stride, target, at, target_stride, source, f, stride, decays[j], gains, kept_B, b,
                kept_B, b, whole, width, by_chance, keys[j], p * width,
            )  # fmt: skip
        elif num_rows == 4:
            advance_4_rows(
                source, s, stride, target, at, target_stride, source, f, stride, decays[j], gains, kept_B, b,
                kept_B, b, whole, width, by_chance, keys[j], p * width,
            )  # fmt: skip
        else:
            begin = 0
        if begin < width:
            advance_tails(
                source, s, stride, target, at, target_stride, decays[j], gains, kept_B, b, kept_B, b, tails,
                num_rows, begin, width, by_chance, keys[j], p * width,
            )  # fmt: skip
        source, s, stride = target, at, target_stride


@cpu_jit
def replay_heads(
    x, x_strides, dt, dt_strides, B, B_strides, C, C_strides, A, D, dt_bias, state, state_strides,
    read_slots, write_slots, seq_lens, rounding, dt_limit, shape, kept, pending, y, begin, end,
):  # fmt: skip
    """Advance states by pending tokens and store them, then run positions. Item ``r * H + h`` stands for head
    h of row r.

    ``shape`` is T, H, P, G, N as in selective_state_update.py; y is flat. ``kept`` is x, gates and B as in
    selective_state_flush.py, each flat. ``pending`` is each row's row in them, its number of pending tokens,
    and the places of a row. A flush has no positions.
    """
    kept_rows, counts, places = pending
    by_chance = rounding[0]
    num_positions, num_heads, head_dim, num_groups, width = shape
    slot_stride, head_stride, row_stride = state_strides
    w, heads_per_group, whole = lanes(), num_heads // num_groups, width - width % lanes()
    unwritten = np.empty(w * width, state.dtype)  # stands in for write slot 0
    gains, tails, totals = aligned(w), aligned(w), aligned(w)  # gains are step x
    most = num_positions + places
    steps, decays = np.empty(most, np.float32), np.empty(most, np.float32)
    keys, tokens = np.empty(most, np.int64), np.empty(most, np.int64)  # tokens: their places
    for item in range(begin, end):
        r, h = item // num_heads, item % num_heads
        g = h // heads_per_group
        row_out = (r * num_positions * num_heads + h) * head_dim
        if read_slots[r] == 0:
            for i in range(num_positions):
                out = row_out + i * num_heads * head_dim
                y[out : out + head_dim] = _ZERO
            continue
        count = counts[r]
        _recall_head(
            r, h, x, x_strides, dt, dt_strides, B, B_strides, A, dt_bias, kept, kept_rows[r] * places,
            places, count, seq_lens[r] - num_positions - count, rounding, dt_limit, shape, steps, decays,
            keys, tokens,
        )  # fmt: skip
        p = 0
        while p < head_dim:
            num_rows = w if p + w <= head_dim else (4 if p + 4 <= head_dim else 1)
            inside = h * head_stride + p * row_stride
            source, s, stride = state, read_slots[r] * slot_stride + inside, row_stride
            if count > 0:
                slot = write_slots[r]
                _advance_pending(
                    source, s, stride, state, slot * slot_stride + inside, slot, unwritten, kept, tokens,
                    count, steps, decays, keys, by_chance, h, g, p, num_rows, shape, gains, tails,
                )  # fmt: skip
                source, s, stride = unwritten, 0, width
                if slot != 0:
                    source, s, stride = state, slot * slot_stride + inside, row_stride
            for i in range(num_positions):
                j = count + i
                f = s + w * stride
                b = r * B_strides[0] + i * B_strides[1] + g * B_strides[2]
                c = r * C_strides[0] + i * C_strides[1] + g * C_strides[2]
                o = r * x_strides[0] + i * x_strides[1] + h * x_strides[2] + p
                out = row_out + i * num_heads * head_dim + p
                if num_rows == w:
                    store(gains, 0, multiply(splat(steps[j]), load(x, o)))
                else:
                    for q in range(num_rows):
                        gains[q] = steps[j] * x[o + q]
                begin, hC = whole, splat(_ZERO)
                # Not in a function of its own, which numba might call instead of inlining it.
                if num_rows == w:
                    hC = advance_rows(
                        source, s, stride, unwritten, 0, width, source, f, stride, decays[j],
                        gains, B, b, C, c, whole, width, by_chance, keys[j], p * width,
                    )  # fmt: skip
                elif num_rows == 4:
                    hC = advance_4_rows(
                        source, s, stride, unwritten, 0, width, source, f, stride, decays[j],
                        gains, B, b, C, c, whole, width, by_chance, keys[j], p * width,
                    )  # fmt: skip
                else:
                    begin = 0
                if begin < width:
                    rest = advance_tails(
                        source, s, stride, unwritten, 0, width, decays[j], gains, B, b, C, c, tails,
                        num_rows, begin, width, by_chance, keys[j], p * width,
                    )  # fmt: skip
                    hC = add(hC, rest)
                if num_rows == w:
                    store(y, out, multiply_add(splat(D[h]), load(x, o), hC))
                else:
                    store(totals, 0, hC)
                    for q in range(num_rows):
                        y[out + q] = multiply_add_number(D[h], x[o + q], totals[q])
                source, s, stride = unwritten, 0, width
            p += num_rows
