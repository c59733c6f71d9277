"""The SSM recurrence over the ragged rows of a prefill batch on CPU, in place in the pool.

    h_t = decay_t h_{t-1} + step_t x_t B_t^T,    y_t = h_t C_t + D x_t

First a head's state ``[P, N]`` (channels, state columns) is transposed to ``[N, P]``. Four of these N rows
(eight with AVX-512), two vectors wide, stay in registers during 64 tokens. Vectors run along P, so B and C
are broadcast, and no sum runs across a vector. B and C of a group are packed once for all its heads. This
takes 3 operations per vector, token and row, at the full speed of the FMA units. Every token and element
takes the same operations in the same order, however the prompt is cut into chunks. A state of 16 bits is
rounded after every GRID_TOKENS tokens of its sequence, in registers and in the pool, and at the end of a row,
so cuts at these places change nothing either.

Arrays are flat, with explicit strides if they may be views of wider ones; the last axis is contiguous.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.jit import cpu_jit
from kernels.cpu.vector import (
    aligned,
    broadcast,
    clear_columns,
    lanes,
    load,
    load_number,
    multiply,
    multiply_add,
    rounded,
    rounding_key,
    splat,
    store,
    store_number,
    transpose,
)
from kernels.formats.stochastic_round import GRID_TOKENS

_TILE_TOKENS = GRID_TOKENS  # inputs and outputs of so many tokens stay in the first-level cache
_PASS_TOKENS = 256  # a state is loaded and stored once for these tokens; B and C stay in the L2 cache
_ROW_PAD = 16  # floats after a token's B and C: rows of 2^n bytes would all start in a few sets of the cache

_ZERO = np.float32(0)


@cpu_jit
def _pack_group(B, B_offset, B_stride, C, C_offset, C_stride, width, num_tokens, packed, row_size):
    """Pack token t's B and C into the two halves of row t, followed by zeros up to the halves' ends."""
    half = (row_size - _ROW_PAD) // 2
    for t in range(num_tokens):
        b, c, o = B_offset + t * B_stride, C_offset + t * C_stride, t * row_size
        if width % lanes() == 0:
            for n in range(0, width, lanes()):
                store(packed, o + n, load(B, b + n))
                store(packed, o + half + n, load(C, c + n))
        else:
            packed[o : o + 2 * half] = _ZERO
            for n in range(width):
                packed[o + n], packed[o + half + n] = B[b + n], C[c + n]


@cpu_jit
def load_state(state, offset, row_stride, count, width, h):
    """Copy a state to the tile: ``h[n, p] = state[p, n]`` for ``count`` rows p."""
    tile = 2 * lanes()
    if count == tile and width % lanes() == 0:
        for p in range(0, tile, lanes()):
            for n in range(0, width, lanes()):
                transpose(state, offset + p * row_stride + n, row_stride, h, n * tile + p, tile)
        return
    for p in range(count):
        for n in range(width):
            h[n * tile + p] = load_number(state, offset + p * row_stride + n)


@cpu_jit
def store_state(state, offset, row_stride, count, width, h):
    tile = 2 * lanes()
    if count == tile and width % lanes() == 0:
        for p in range(0, tile, lanes()):
            for n in range(0, width, lanes()):
                transpose(h, n * tile + p, tile, state, offset + p * row_stride + n, row_stride)
        return
    for p in range(count):
        for n in range(width):
            store_number(state, offset + p * row_stride + n, h[n * tile + p])


@cpu_jit
def _advance(h, row, packed, row_size, decay, u, y, first, last):
    """Advance four rows of h over tokens ``first`` to ``last``; add their contributions to y."""
    w = lanes()
    o, half = row * 2 * w, (row_size - _ROW_PAD) // 2
    h00, h01, h10, h11 = load(h, o), load(h, o + w), load(h, o + 2 * w), load(h, o + 3 * w)
    h20, h21, h30, h31 = load(h, o + 4 * w), load(h, o + 5 * w), load(h, o + 6 * w), load(h, o + 7 * w)
    for t in range(first, last):
        d, i, j = broadcast(decay, t), t * 2 * w, t * row_size + row
        k = j + half
        u0, u1, y0, y1 = load(u, i), load(u, i + w), load(y, i), load(y, i + w)
        b, c = broadcast(packed, j), broadcast(packed, k)
        h00, h01 = multiply_add(b, u0, multiply(h00, d)), multiply_add(b, u1, multiply(h01, d))
        y0, y1 = multiply_add(c, h00, y0), multiply_add(c, h01, y1)
        b, c = broadcast(packed, j + 1), broadcast(packed, k + 1)
        h10, h11 = multiply_add(b, u0, multiply(h10, d)), multiply_add(b, u1, multiply(h11, d))
        y0, y1 = multiply_add(c, h10, y0), multiply_add(c, h11, y1)
        b, c = broadcast(packed, j + 2), broadcast(packed, k + 2)
        h20, h21 = multiply_add(b, u0, multiply(h20, d)), multiply_add(b, u1, multiply(h21, d))
        y0, y1 = multiply_add(c, h20, y0), multiply_add(c, h21, y1)
        b, c = broadcast(packed, j + 3), broadcast(packed, k + 3)
        h30, h31 = multiply_add(b, u0, multiply(h30, d)), multiply_add(b, u1, multiply(h31, d))
        y0, y1 = multiply_add(c, h30, y0), multiply_add(c, h31, y1)
        store(y, i, y0)
        store(y, i + w, y1)
    store(h, o, h00)
    store(h, o + w, h01)
    store(h, o + 2 * w, h10)
    store(h, o + 3 * w, h11)
    store(h, o + 4 * w, h20)
    store(h, o + 5 * w, h21)
    store(h, o + 6 * w, h30)
    store(h, o + 7 * w, h31)


@cpu_jit
def _load_two(h, o):
    """Load two rows of two vectors."""
    w = lanes()
    return load(h, o), load(h, o + w), load(h, o + 2 * w), load(h, o + 3 * w)


@cpu_jit
def _store_two(h, o, a0, a1, b0, b1):
    w = lanes()
    store(h, o, a0)
    store(h, o + w, a1)
    store(h, o + 2 * w, b0)
    store(h, o + 3 * w, b1)


@cpu_jit
def _advance_row(h0, h1, d, b, c, u0, u1, y0, y1):
    """Advance one row of h by one token; add its contribution to y."""
    h0, h1 = multiply_add(b, u0, multiply(h0, d)), multiply_add(b, u1, multiply(h1, d))
    return h0, h1, multiply_add(c, h0, y0), multiply_add(c, h1, y1)


@cpu_jit
def _advance_eight(h, row, packed, row_size, decay, u, y, first, last):
    """Do as :func:`_advance` for eight rows of h, which need half of the 32 registers of AVX-512.

    The inputs and outputs of a token are loaded half as often. Every number has the same bits.
    """
    w = lanes()
    o, half = row * 2 * w, (row_size - _ROW_PAD) // 2
    h00, h01, h10, h11 = _load_two(h, o + 0 * w)
    h20, h21, h30, h31 = _load_two(h, o + 4 * w)
    h40, h41, h50, h51 = _load_two(h, o + 8 * w)
    h60, h61, h70, h71 = _load_two(h, o + 12 * w)
    for t in range(first, last):
        d, i, j = broadcast(decay, t), t * 2 * w, t * row_size + row
        k = j + half
        u0, u1, y0, y1 = load(u, i), load(u, i + w), load(y, i), load(y, i + w)
        h00, h01, y0, y1 = _advance_row(
            h00, h01, d, broadcast(packed, j + 0), broadcast(packed, k + 0), u0, u1, y0, y1
        )
        h10, h11, y0, y1 = _advance_row(
            h10, h11, d, broadcast(packed, j + 1), broadcast(packed, k + 1), u0, u1, y0, y1
        )
        h20, h21, y0, y1 = _advance_row(
            h20, h21, d, broadcast(packed, j + 2), broadcast(packed, k + 2), u0, u1, y0, y1
        )
        h30, h31, y0, y1 = _advance_row(
            h30, h31, d, broadcast(packed, j + 3), broadcast(packed, k + 3), u0, u1, y0, y1
        )
        h40, h41, y0, y1 = _advance_row(
            h40, h41, d, broadcast(packed, j + 4), broadcast(packed, k + 4), u0, u1, y0, y1
        )
        h50, h51, y0, y1 = _advance_row(
            h50, h51, d, broadcast(packed, j + 5), broadcast(packed, k + 5), u0, u1, y0, y1
        )
        h60, h61, y0, y1 = _advance_row(
            h60, h61, d, broadcast(packed, j + 6), broadcast(packed, k + 6), u0, u1, y0, y1
        )
        h70, h71, y0, y1 = _advance_row(
            h70, h71, d, broadcast(packed, j + 7), broadcast(packed, k + 7), u0, u1, y0, y1
        )
        store(y, i, y0)
        store(y, i + w, y1)
    _store_two(h, o + 0 * w, h00, h01, h10, h11)
    _store_two(h, o + 4 * w, h20, h21, h30, h31)
    _store_two(h, o + 8 * w, h40, h41, h50, h51)
    _store_two(h, o + 12 * w, h60, h61, h70, h71)


@cpu_jit
def _load_inputs(x, offset, stride, step, D, count, u, y):
    """Compute ``u = step x`` and ``y = D x`` for ``count`` columns."""
    w = lanes()
    for t in range(step.shape[0]):
        o, i = offset + t * stride, t * 2 * w
        if count == 2 * w:
            x0, x1 = load(x, o), load(x, o + w)
            store(u, i, multiply(broadcast(step, t), x0))
            store(u, i + w, multiply(broadcast(step, t), x1))
            store(y, i, multiply(splat(D), x0))
            store(y, i + w, multiply(splat(D), x1))
        else:
            for p in range(count):
                u[i + p] = step[t] * x[o + p]
                y[i + p] = D * x[o + p]


@cpu_jit
def _store_outputs(tile_y, num_tokens, count, y, offset, stride):
    w = lanes()
    for t in range(num_tokens):
        o, i = offset + t * stride, t * 2 * w
        if count == 2 * w:
            store(y, o, load(tile_y, i))
            store(y, o + w, load(tile_y, i + w))
        else:
            for p in range(count):
                y[o + p] = tile_y[i + p]


@cpu_jit
def round_columns(state, h, p, width, by_chance, key):
    """Round h's columns to numbers that the pool can store. They are the rows of the state from p on."""
    w = lanes()
    for n in range(width):
        o, e = n * 2 * w, p * width + n
        store(h, o, rounded(state, load(h, o), by_chance, key, e, width))
        store(h, o + w, rounded(state, load(h, o + w), by_chance, key, e + w * width, width))


@cpu_jit
def _scan_tile(
    x, x_offset, x_stride, step, decay, D, count, packed, row_size, h, u, tile_y, y, y_offset, y_stride,
    state, position, p, width, by_chance, head_seed,
):  # fmt: skip
    """Scan a pass's tokens for ``count`` columns of one head, from p on; their state is h.

    ``position`` tokens of the sequence come before the pass.
    """
    num_tokens, num_rows = step.shape[0], (row_size - _ROW_PAD) // 2
    _load_inputs(x, x_offset, x_stride, step, D, count, u, tile_y)
    first = 0
    while first < num_tokens:
        last = min(first + _TILE_TOKENS - (position + first) % _TILE_TOKENS, num_tokens)
        row = 0
        if lanes() == 16:
            while row + 8 <= num_rows:
                _advance_eight(h, row, packed, row_size, decay, u, tile_y, first, last)
                row += 8
        while row < num_rows:
            _advance(h, row, packed, row_size, decay, u, tile_y, first, last)
            row += 4
        if state.itemsize < 4:
            round_columns(state, h, p, width, by_chance, rounding_key(head_seed, 0, position + last))
        first = last
    _store_outputs(tile_y, num_tokens, count, y, y_offset, y_stride)


@cpu_jit
def scan_heads(
    x, x_strides, B, B_strides, C, C_strides,
    step, decay, D, num_groups, head_dim, width, state, slot_stride, head_stride, row_stride,
    bounds, read_slots, write_slots, has_initial, num_before, rounding, y, begin, end,
):  # fmt: skip
    """Scan all rows of a prefill batch, in order, so that a row may start where an earlier row ended.

    Items ``begin : end`` are heads. step and decay are ``[H, num_tokens]`` for H heads.
    """
    num_heads, tile, (by_chance, layer_seed, first_head) = step.shape[0], 2 * lanes(), rounding
    most = min(_PASS_TOKENS, step.shape[1])
    num_rows = (width + 3) // 4 * 4
    row_size = 2 * num_rows + _ROW_PAD
    packed, h = aligned(most * row_size), aligned(num_rows * tile)
    u, tile_y = aligned(most * tile), aligned(most * tile)
    h[:] = _ZERO
    y_stride, num_columns = num_heads * head_dim, (end - begin) * head_dim
    clear_columns(y, bounds[-1], y.shape[0] // y_stride, y_stride, begin * head_dim, num_columns)
    for s in range(read_slots.shape[0]):
        if write_slots[s] == 0:
            clear_columns(y, bounds[s], bounds[s + 1], y_stride, begin * head_dim, num_columns)
            continue
        first = bounds[s]
        while first < bounds[s + 1]:
            position = num_before[s] + first - bounds[s]
            last = min(first + _PASS_TOKENS - position % _PASS_TOKENS, bounds[s + 1])
            source = read_slots[s] if first == bounds[s] else write_slots[s]
            packed_group = -1
            for head in range(begin, end):
                group = head // (num_heads // num_groups)
                if group != packed_group:
                    packed_group = group
                    b, c = group * B_strides[1], group * C_strides[1]
                    _pack_group(
                        B, b + first * B_strides[0], B_strides[0],
                        C, c + first * C_strides[0], C_strides[0], width, last - first, packed, row_size,
                    )  # fmt: skip
                for p in range(0, head_dim, tile):
                    count, place = min(tile, head_dim - p), head * head_stride + p * row_stride
                    if has_initial[s] or first > bounds[s]:
                        load_state(state, source * slot_stride + place, row_stride, count, width, h)
                    else:
                        h[:] = _ZERO
                    _scan_tile(
                        x, first * x_strides[0] + head * x_strides[1] + p, x_strides[0],
                        step[head, first:last], decay[head, first:last], D[head], count,
                        packed, row_size, h, u, tile_y, y, first * y_stride + head * head_dim + p, y_stride,
                        state, position, p, width, by_chance, layer_seed + first_head + head,
                    )  # fmt: skip
                    store_state(state, write_slots[s] * slot_stride + place, row_stride, count, width, h)
            first = last
