"""Prototypes of the ways to keep a state that benchmarks/speculation/state_replay.py compares. One thread,
float32."""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu.jit import cpu_jit
from kernels.cpu.vector import aligned, lanes, load, multiply, multiply_add, splat, store
from kernels.ssm.selective_state_update_cpu import softplus
from kernels.ssm.state_rows import advance_rows

_TILE_ROWS = 16  # of a head's state: 8 KB at N = 128, so that it stays in the first-level cache
_TILE = np.int64(_TILE_ROWS)
_NO_KEY = np.int64(0)
"""The key of stochastic rounding, which float32 states don't use."""


@cpu_jit
def _convolve_token(x, first, token_stride, past, taps, bias, t, out):
    num_past, num_channels = past.shape
    out[:] = bias
    for k in range(num_past + 1):
        j, tap = t - num_past + k, taps[k]
        o = first + j * token_stride
        source = past[num_past + j] if j < 0 else x[o : o + num_channels]
        for c in range(num_channels):
            out[c] += tap[c] * source[c]


@cpu_jit
def replay_conv(x, weight, bias, raw, slots, accepted, side, y):
    num_rows, num_positions, num_channels = y.shape
    num_taps = weight.shape[0] // num_channels
    num_past = num_taps - 1
    taps = np.ascontiguousarray(weight.reshape(num_channels, num_taps).T)
    past = np.empty((num_past, num_channels), np.float32)
    for r in range(num_rows):
        old, new = raw[slots[r], 1 - side], raw[slots[r], side]
        for k in range(num_past):
            past[k, :] = old[accepted + k]
            new[k, :] = past[k]
        first = r * num_positions * num_channels
        for i in range(num_positions):
            _convolve_token(x, first, num_channels, past, taps, bias, i, y[r, i])
            o = first + i * num_channels
            new[num_past + i, :] = x[o : o + num_channels]


@cpu_jit
def _scales_of(dt, dt_bias, A, r, h, scales):
    """Computes decay and step of each position, ``[T, 2]``."""
    for i in range(scales.shape[0]):
        step = softplus(dt[r, i, h] + dt_bias[h])
        scales[i, 0], scales[i, 1] = np.float32(math.exp(A[h] * step)), step


@cpu_jit
def _store_inputs(x, B, scales, r, h, heads_per_group, x_new, B_new, scales_new):
    for i in range(x.shape[1]):
        x_new[i, h, :] = x[r, i, h]
        scales_new[i, h, :] = scales[i]
        if h % heads_per_group == 0:
            B_new[i, h // heads_per_group, :] = B[r, i, h // heads_per_group]


@cpu_jit
def _copy(source, source_offset, target, target_offset, length):
    """Copies twice as fast as numba's slice assignment, whose slowness would hide the cost of the bytes."""
    old = source[source_offset : source_offset + length]
    new = target[target_offset : target_offset + length]
    for n in range(length):
        new[n] = old[n]


@cpu_jit
def _advance_tile(tile, width, decay, step, D, B, C, x, y, gains):
    """Advances a tile of a state in place by one position. ``gains`` is scratch memory for one vector."""
    w = lanes()
    for p in range(0, _TILE, w):
        o = p * width
        store(gains, 0, multiply(splat(step), load(x, p)))
        hC = advance_rows(
            tile, o, width, tile, o, width, tile, o, width, decay, gains, B, 0, C, 0, width, width, False,
            _NO_KEY, o,
        )  # fmt: skip
        store(y, p, multiply_add(splat(D), load(x, p), hC))


@cpu_jit
def _absorb(state, offset, width, decay, step, B, x):
    """:func:`_advance_tile` without its output."""
    for p in range(0, x.shape[0], 4):
        o = offset + p * width
        h0, h1 = state[o : o + width], state[o + width : o + 2 * width]
        h2, h3 = state[o + 2 * width : o + 3 * width], state[o + 3 * width : o + 4 * width]
        u0, u1, u2, u3 = step * x[p], step * x[p + 1], step * x[p + 2], step * x[p + 3]
        for n in range(width):
            b = B[n]
            v0, v1 = h0[n] * decay + u0 * b, h1[n] * decay + u1 * b
            v2, v3 = h2[n] * decay + u2 * b, h3[n] * decay + u3 * b
            h0[n], h1[n], h2[n], h3[n] = v0, v1, v2, v3


@cpu_jit
def slots_tiled(x, dt, A, B, C, D, dt_bias, state, read_slots, write_slots, y):
    num_rows, num_positions, num_heads, head_dim = x.shape
    heads_per_group, width = num_heads // B.shape[2], B.shape[3]
    head_size = head_dim * width
    scales = np.empty((num_positions, 2), np.float32)
    scratch = aligned(_TILE * width)
    gains = aligned(lanes())
    for item in range(num_rows * num_heads):
        r, h = item // num_heads, item % num_heads
        g = h // heads_per_group
        _scales_of(dt, dt_bias, A, r, h, scales)
        for p in range(0, head_dim, _TILE):
            o = (read_slots[r] * num_heads + h) * head_size + p * width
            _copy(state, o, scratch, 0, _TILE * width)
            for i in range(num_positions):
                x_i, y_i = x[r, i, h, p : p + _TILE], y[r, i, h, p : p + _TILE]
                decay, step = scales[i, 0], scales[i, 1]
                _advance_tile(scratch, width, decay, step, D[h], B[r, i, g], C[r, i, g], x_i, y_i, gains)
                o = (write_slots[r, i] * num_heads + h) * head_size + p * width
                _copy(scratch, 0, state, o, _TILE * width)


@cpu_jit
def replay(x, dt, A, B, C, D, dt_bias, state, slots, x_in, B_in, scales_in, accepted, side, y):
    num_rows, num_positions, num_heads, head_dim = x.shape
    heads_per_group, width = num_heads // B.shape[2], B.shape[3]
    scales = np.empty((num_positions, 2), np.float32)
    scratch = aligned(_TILE * width)
    gains = aligned(lanes())
    for item in range(num_rows * num_heads):
        r, h = item // num_heads, item % num_heads
        g, slot = h // heads_per_group, slots[r]
        x_old, B_old, scales_old = x_in[slot, 1 - side], B_in[slot, 1 - side], scales_in[slot, 1 - side]
        _scales_of(dt, dt_bias, A, r, h, scales)
        _store_inputs(
            x, B, scales, r, h, heads_per_group, x_in[slot, side], B_in[slot, side], scales_in[slot, side]
        )
        for p in range(0, head_dim, _TILE):
            o = ((slot * num_heads + h) * head_dim + p) * width
            for i in range(accepted):
                decay, step = scales_old[i, h, 0], scales_old[i, h, 1]
                _absorb(state, o, width, decay, step, B_old[i, g], x_old[i, h, p : p + _TILE])
            _copy(state, o, scratch, 0, _TILE * width)
            for i in range(num_positions):
                x_i, y_i = x[r, i, h, p : p + _TILE], y[r, i, h, p : p + _TILE]
                decay, step = scales[i, 0], scales[i, 1]
                _advance_tile(scratch, width, decay, step, D[h], B[r, i, g], C[r, i, g], x_i, y_i, gains)


@cpu_jit
def _mixing(B, C, scales, r, g, mixing):
    """y_i = mixing[i, T] h C_i + sum_j mixing[i, j] x_j: the recurrence, unrolled (arXiv:2405.21060)."""
    num_positions = scales.shape[0]
    carried = np.float32(1.0)
    for i in range(num_positions):
        carried *= scales[i, 0]
        mixing[i, num_positions] = carried
        weight = np.float32(1.0)
        for j in range(i, -1, -1):
            b, c = B[r, j, g], C[r, i, g]
            score = np.float32(0.0)
            for n in range(b.shape[0]):
                score += b[n] * c[n]
            mixing[i, j] = weight * scales[j, 1] * score
            weight *= scales[j, 0]


@cpu_jit
def _project_by_twos(state, offset, width, C0, C1, y0, y1):
    """``y[p] = h_p C`` of two positions for four rows at a time, so that a loaded state is used twice."""
    for p in range(0, y0.shape[0], 4):
        o = offset + p * width
        h0, h1 = state[o : o + width], state[o + width : o + 2 * width]
        h2, h3 = state[o + 2 * width : o + 3 * width], state[o + 3 * width : o + 4 * width]
        s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = np.float32(0.0)
        for n in range(width):
            c, d = C0[n], C1[n]
            s0, s1, s2, s3 = s0 + h0[n] * c, s1 + h1[n] * c, s2 + h2[n] * c, s3 + h3[n] * c
            t0, t1, t2, t3 = t0 + h0[n] * d, t1 + h1[n] * d, t2 + h2[n] * d, t3 + h3[n] * d
        y0[p], y0[p + 1], y0[p + 2], y0[p + 3] = s0, s1, s2, s3
        y1[p], y1[p + 1], y1[p + 2], y1[p + 3] = t0, t1, t2, t3


@cpu_jit
def replay_direct(x, dt, A, B, C, D, dt_bias, state, slots, x_in, B_in, scales_in, accepted, side, y):
    """T even."""
    num_rows, num_positions, num_heads, head_dim = x.shape
    heads_per_group, width = num_heads // B.shape[2], B.shape[3]
    scales = np.empty((num_positions, 2), np.float32)
    mixing = np.empty((num_positions, num_positions + 1), np.float32)
    for item in range(num_rows * num_heads):
        r, h = item // num_heads, item % num_heads
        g, slot = h // heads_per_group, slots[r]
        x_old, B_old, scales_old = x_in[slot, 1 - side], B_in[slot, 1 - side], scales_in[slot, 1 - side]
        _scales_of(dt, dt_bias, A, r, h, scales)
        _store_inputs(
            x, B, scales, r, h, heads_per_group, x_in[slot, side], B_in[slot, side], scales_in[slot, side]
        )
        _mixing(B, C, scales, r, g, mixing)
        for p in range(0, head_dim, _TILE):
            o = ((slot * num_heads + h) * head_dim + p) * width
            for i in range(accepted):
                decay, step = scales_old[i, h, 0], scales_old[i, h, 1]
                _absorb(state, o, width, decay, step, B_old[i, g], x_old[i, h, p : p + _TILE])
            for i in range(0, num_positions, 2):
                y0, y1 = y[r, i, h, p : p + _TILE], y[r, i + 1, h, p : p + _TILE]
                _project_by_twos(state, o, width, C[r, i, g], C[r, i + 1, g], y0, y1)
        for i in range(num_positions):
            for p in range(head_dim):
                out = mixing[i, num_positions] * y[r, i, h, p] + D[h] * x[r, i, h, p]
                for j in range(i + 1):
                    out += mixing[i, j] * x[r, j, h, p]
                y[r, i, h, p] = out
