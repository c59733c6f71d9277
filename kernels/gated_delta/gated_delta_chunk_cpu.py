"""The gated delta rule over the ragged rows of a prefill batch on CPU, in place in the pool.

    r = decay_t S_{t-1} k_t,    S_t = decay_t S_{t-1} + beta_t (v_t - r) k_t^T,    o_t = S_t q_t

First a head's state ``[Dv, Dk]`` (value and key channels) is transposed to ``[Dk, Dv]``, in tiles of as many
value channels as two vector registers hold. With 128 key channels and 16 floats per register, a tile has
16 KB and stays in the first-level cache for a span of up to _SPAN_TOKENS tokens. One loop over its rows
finishes token t - 1 and begins token t:

    S_n = decay_{t-1} S_n + k_{t-1,n} u,    r += k_{t,n} S_n,    o += q_{t,n} S_n          for every n
    u = beta_t (v_t - decay_t r),           o_t = decay_t o + (k_t q_t) u

This takes 4 operations per vector, token and row. The GPU's chunked form needs 3 for its products with the
state, plus the products within a chunk. There are no chunks here: every token and element takes the same
operations in the same order, however the prompt is cut. Normalized keys and queries of a key head are packed
once for all its value heads. A state of 16 bits is rounded after every GRID_TOKENS tokens of its sequence and
at the end of the batch's row; spans end at these places.

Arrays are flat, with explicit strides if they may be views of wider ones; the last axis is contiguous.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.jit import cpu_jit
from kernels.cpu.vector import (
    add,
    aligned,
    broadcast,
    clear_columns,
    lanes,
    load,
    multiply,
    multiply_add,
    rounding_key,
    splat,
    store,
    subtract,
)
from kernels.formats.stochastic_round import GRID_TOKENS
from kernels.gated_delta.gated_delta_update_cpu import dot, gates, normalize
from kernels.ssm.ssd_chunk_scan_cpu import load_state, round_columns, store_state

# Keys and queries of this many tokens stay in the second-level cache while all channels of v are computed.
_SPAN_TOKENS = 128
_ROW_PAD = 16  # floats added to a token's row: rows of 2^n bytes would all start in a few sets of the cache

_ZERO, _ONE = np.float32(0), np.float32(1)


@cpu_jit
def scan_gates(a, b, A, dt_bias, decay, beta, begin, end):
    """Compute ``decay`` and ``beta`` ``[Hv, n]`` (value heads, tokens) of heads ``begin : end``.

    The formulas are those for decode rows.
    """
    for h in range(begin, end):
        for t in range(a.shape[0]):
            decay[h, t], beta[h, t] = gates(a[t, h], b[t, h], A[h], dt_bias[h])


@cpu_jit
def _pack_key_head(q, q_at, q_stride, k, k_at, k_stride, width, scale, num_tokens, packed, row_size, kq):
    """Pack token t's key and query into the two halves of row t + 1. The first and last row are zero."""
    half = (row_size - _ROW_PAD) // 2
    packed[0:row_size] = _ZERO
    packed[(num_tokens + 1) * row_size : (num_tokens + 2) * row_size] = _ZERO
    for t in range(num_tokens):
        o = (t + 1) * row_size
        normalize(k, k_at + t * k_stride, width, _ONE, packed, o)
        normalize(q, q_at + t * q_stride, width, scale, packed, o + half)
        kq[t] = dot(packed, o, packed, o + half, width)
        if width < half:
            packed[o + width : o + half] = _ZERO
            packed[o + half + width : o + 2 * half] = _ZERO


@cpu_jit
def _scan_tile(h, num_rows, packed, row_size, decay, beta, kq, v, v_at, v_stride, y, y_at, y_stride):
    """Scan a pass's tokens for two vectors of value channels of one head; their state is h."""
    w, half, num_tokens = lanes(), (row_size - _ROW_PAD) // 2, decay.shape[0]
    zero = splat(_ZERO)
    decays, u0, u1 = splat(_ONE), zero, zero  # no token before the first one has to be finished
    for t in range(num_tokens + 1):
        last, next_k = t * row_size, (t + 1) * row_size
        next_q = next_k + half
        r00, r01, r10, r11, o00, o01, o10, o11 = zero, zero, zero, zero, zero, zero, zero, zero
        for n in range(0, num_rows, 2):
            i, j = n * 2 * w, (n + 1) * 2 * w
            k = broadcast(packed, last + n)
            h0 = multiply_add(k, u0, multiply(load(h, i), decays))
            h1 = multiply_add(k, u1, multiply(load(h, i + w), decays))
            store(h, i, h0)
            store(h, i + w, h1)
            k, q = broadcast(packed, next_k + n), broadcast(packed, next_q + n)
            r00, r01 = multiply_add(k, h0, r00), multiply_add(k, h1, r01)
            o00, o01 = multiply_add(q, h0, o00), multiply_add(q, h1, o01)
            k = broadcast(packed, last + n + 1)
            h0 = multiply_add(k, u0, multiply(load(h, j), decays))
            h1 = multiply_add(k, u1, multiply(load(h, j + w), decays))
            store(h, j, h0)
            store(h, j + w, h1)
            k, q = broadcast(packed, next_k + n + 1), broadcast(packed, next_q + n + 1)
            r10, r11 = multiply_add(k, h0, r10), multiply_add(k, h1, r11)
            o10, o11 = multiply_add(q, h0, o10), multiply_add(q, h1, o11)
        if t < num_tokens:
            decays, betas, kqs = broadcast(decay, t), broadcast(beta, t), broadcast(kq, t)
            i, o = v_at + t * v_stride, y_at + t * y_stride
            u0 = multiply(betas, subtract(load(v, i), multiply(decays, add(r00, r10))))
            u1 = multiply(betas, subtract(load(v, i + w), multiply(decays, add(r01, r11))))
            store(y, o, multiply_add(kqs, u0, multiply(decays, add(o00, o10))))
            store(y, o + w, multiply_add(kqs, u1, multiply(decays, add(o01, o11))))


@cpu_jit
def _scan_narrow_tile(
    h, num_rows, packed, row_size, decay, beta, kq, v, v_at, v_stride, y, y_at, y_stride, count, scratch
):  # fmt: skip
    """Like :func:`_scan_tile`, but for only ``count`` channels, which do not fill two vectors."""
    tile, num_tokens = 2 * lanes(), decay.shape[0]
    inputs, outputs = scratch[: num_tokens * tile], scratch[num_tokens * tile : 2 * num_tokens * tile]
    inputs[:] = _ZERO
    for t in range(num_tokens):
        for p in range(count):
            inputs[t * tile + p] = v[v_at + t * v_stride + p]
    _scan_tile(h, num_rows, packed, row_size, decay, beta, kq, inputs, 0, tile, outputs, 0, tile)
    for t in range(num_tokens):
        for p in range(count):
            y[y_at + t * y_stride + p] = outputs[t * tile + p]


@cpu_jit
def scan_heads(
    q, q_strides, k, k_strides, v, v_strides,
    decay, beta, scale, num_key_heads, width, head_dim, state, slot_stride, head_stride, row_stride,
    bounds, read_slots, write_slots, has_initial, num_before, rounding, y, begin, end,
):  # fmt: skip
    """Scan all rows of a prefill batch, in order, so that a row may start where another one ended.

    Items ``begin : end`` are value heads. decay and beta are ``[Hv, num_tokens]``.
    Queries are normalized to the length ``scale``.
    """
    num_heads, tile, (by_chance, layer_seed, first_head) = decay.shape[0], 2 * lanes(), rounding
    is_narrow = state.itemsize < 4
    pass_tokens = GRID_TOKENS if is_narrow else _SPAN_TOKENS
    most = min(pass_tokens, decay.shape[1])
    num_rows = (width + 1) // 2 * 2
    row_size = 2 * num_rows + _ROW_PAD
    packed, h = aligned((most + 2) * row_size), aligned(num_rows * tile)
    kq, scratch = np.empty(most, np.float32), aligned(2 * most * tile)
    y_stride, num_columns = num_heads * head_dim, (end - begin) * head_dim
    clear_columns(y, bounds[-1], y.shape[0] // y_stride, y_stride, begin * head_dim, num_columns)
    for s in range(read_slots.shape[0]):
        if write_slots[s] == 0:
            clear_columns(y, bounds[s], bounds[s + 1], y_stride, begin * head_dim, num_columns)
            continue
        first = bounds[s]
        while first < bounds[s + 1]:
            position = num_before[s] + first - bounds[s]
            last = min(first + pass_tokens - position % pass_tokens, bounds[s + 1])
            position += last - first
            source = read_slots[s] if first == bounds[s] else write_slots[s]
            packed_head = -1
            for head in range(begin, end):
                key_head = head // (num_heads // num_key_heads)
                if key_head != packed_head:
                    packed_head = key_head
                    _pack_key_head(
                        q, key_head * q_strides[1] + first * q_strides[0], q_strides[0],
                        k, key_head * k_strides[1] + first * k_strides[0], k_strides[0],
                        width, scale, last - first, packed, row_size, kq,
                    )  # fmt: skip
                for p in range(0, head_dim, tile):
                    count, place = min(tile, head_dim - p), head * head_stride + p * row_stride
                    v_at = first * v_strides[0] + head * v_strides[1] + p
                    y_at = first * y_stride + head * head_dim + p
                    if has_initial[s] or first > bounds[s]:
                        load_state(state, source * slot_stride + place, row_stride, count, width, h)
                        h[width * tile :] = _ZERO
                    else:
                        h[:] = _ZERO
                    if count == tile:
                        _scan_tile(
                            h, num_rows, packed, row_size, decay[head, first:last], beta[head, first:last],
                            kq, v, v_at, v_strides[0], y, y_at, y_stride,
                        )  # fmt: skip
                    else:
                        _scan_narrow_tile(
                            h, num_rows, packed, row_size, decay[head, first:last], beta[head, first:last],
                            kq, v, v_at, v_strides[0], y, y_at, y_stride, count, scratch,
                        )  # fmt: skip
                    if is_narrow:
                        key = rounding_key(layer_seed, first_head + head, position)
                        round_columns(state, h, p, width, by_chance, key)
                    store_state(state, write_slots[s] * slot_stride + place, row_stride, count, width, h)
            first = last
