"""Attention of prefill rows over the paged KV cache on CPU, by products of blocks as in flash attention.

The unit of work is a tile: consecutive queries of one row, for one KV head, with all query heads that share
this head. A tile goes through the row's tokens 64 at a time with an online softmax:

    gather   K of these tokens transposed, V unchanged, in float32: once for all the tile's queries
    scores   s = q K^T, six queries by two vectors of tokens (four by four with AVX-512) in registers
    softmax  m' = max(m, max s), p = exp(s - m'), l' = l exp(m - m') + sum p
    values   acc' = acc exp(m - m') + p V, out = acc / l at the end

These queries are computed together, up to the last token that any of them sees. A token that a query does not
see gets weight 0; since its values are finite, it adds nothing. Data after the row's last token (stale block
ids, NaN) is never multiplied. Each sum runs over dims or tokens in order, so a query's result does not depend
on its tile, chunk or batch.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.attention.page_vectors import multiply_2, multiply_4, product_rows
from kernels.cpu.jit import FlatArray, cpu_jit
from kernels.cpu.vector import (
    add,
    aligned,
    exponential,
    lanes,
    largest_of,
    load,
    load_number,
    maximum,
    multiply,
    splat,
    store,
    subtract,
    sum_of,
    transpose,
)

_STEP_TOKENS = 64
_TILE_QUERIES = 192  # K and V are read from memory once for all queries of a tile
_GRAIN_PRODUCTS = 2**22  # a thread's minimum share: about 100 µs

_ZERO, _NEGATIVE_INFINITY = np.float32(0), np.float32(-np.inf)


@cpu_jit
def _multiply(a, a_stride, a_offset, b, b_stride, depth, c, c_offset, c_stride, columns, adds):
    """Compute ``c = a b``, or ``c += a b``, for a ``[product_rows(), depth]`` and b ``[depth, columns]``.

    Columns are pairs of vectors. With AVX-512 four vectors are computed at a time: a number of ``a`` is
    loaded half as often. Every sum has the same bits.
    """
    tile, j = 2 * lanes(), 0
    if lanes() == 16:
        while j + 2 * tile <= columns:
            multiply_4(a, a_offset, a_stride, b, j, b_stride, depth, c, c_offset + j, c_stride, adds)
            j += 2 * tile
    while j < columns:
        multiply_2(a, a_offset, a_stride, b, j, b_stride, depth, c, c_offset + j, c_stride, adds)
        j += tile


@cpu_jit
def _gather(
    k_cache, v_cache, cache_strides, block_size, head_dim, kv_head, block_ids, first, count, keys, values
):  # fmt: skip
    """Copy ``count`` tokens from ``first`` on to ``keys[d, t]`` and ``values[t, d]``, a block at a time."""
    width = values.shape[0] // _STEP_TOKENS
    t = 0
    while t < count:
        inside = (first + t) % block_size
        run = min(count - t, block_size - inside)
        base = block_ids[(first + t) // block_size] * cache_strides[0] + kv_head * cache_strides[1]
        base += inside * head_dim
        whole = 0
        if head_dim % lanes() == 0:
            # Keys after the last token in its block are copied as well; their scores are dropped.
            reach = min(block_size - inside, _STEP_TOKENS - t)
            while whole < run and whole + lanes() <= reach:
                for d in range(0, head_dim, lanes()):
                    o = d * _STEP_TOKENS + t + whole
                    transpose(k_cache, base + whole * head_dim + d, head_dim, keys, o, _STEP_TOKENS)
                whole += lanes()
        for i in range(whole, run):
            for d in range(head_dim):
                keys[d * _STEP_TOKENS + t + i] = load_number(k_cache, base + i * head_dim + d)
        for i in range(run):
            source, target = base + i * head_dim, (t + i) * width
            whole = head_dim - head_dim % lanes()
            for d in range(0, whole, lanes()):
                store(values, target + d, load(v_cache, source + d))
            for d in range(whole, head_dim):
                values[target + d] = load_number(v_cache, source + d)
        t += run


@cpu_jit
def _weigh(scores, row, live, reach, highest, total, i, acc, width):
    """Turn query i's scores into weights, 0 from ``live`` to ``reach``; rescale its earlier sums."""
    w = lanes()
    for t in range(live, reach):
        scores[row + t] = _NEGATIVE_INFINITY
    largest = load(scores, row)
    for t in range(w, reach, w):
        largest = maximum(load(scores, row + t), largest)
    old_highest, new_highest = highest[i], largest_of(largest)
    added = load(total, i * w)
    if new_highest > old_highest:
        highest[i] = new_highest
        rescale = exponential(subtract(splat(old_highest), splat(new_highest)))
        added = multiply(added, rescale)
        for d in range(i * width, (i + 1) * width, w):
            store(acc, d, multiply(load(acc, d), rescale))
    shift = splat(highest[i])
    for t in range(0, reach, w):
        weight = exponential(subtract(load(scores, row + t), shift))
        store(scores, row + t, weight)
        added = add(added, weight)
    store(total, i * w, added)


@cpu_jit
def _attend_step(
    queries, head_dim, num_queries, heads_per_kv, first_len, first, count, keys, values, scores,
    highest, total, acc,
):  # fmt: skip
    """Attend from a tile's queries, some at a time, to the ``count`` tokens from ``first`` on."""
    tile, width = 2 * lanes(), acc.shape[0] // highest.shape[0]
    for i in range(0, num_queries, product_rows()):
        last = min(i + product_rows(), num_queries) - 1
        most = min(count, first_len + last // heads_per_kv - first)
        if most <= 0:
            continue
        reach = (most + tile - 1) // tile * tile
        _multiply(
            queries, head_dim, i * head_dim, keys, _STEP_TOKENS, head_dim, scores, 0, _STEP_TOKENS, reach, 0
        )
        for j in range(product_rows()):
            live = min(count, first_len + (i + j) // heads_per_kv - first)
            if i + j < num_queries and live > 0:
                _weigh(scores, j * _STEP_TOKENS, live, reach, highest, total, i + j, acc, width)
            else:
                scores[j * _STEP_TOKENS : j * _STEP_TOKENS + reach] = _ZERO
        _multiply(scores, _STEP_TOKENS, 0, values, width, most, acc, i * width, width, width, 1)


@cpu_jit
def _scale(source, offset, factor, target, target_offset, count):
    whole = count - count % lanes()
    for d in range(0, whole, lanes()):
        store(target, target_offset + d, multiply(load(source, offset + d), splat(factor)))
    for d in range(whole, count):
        target[target_offset + d] = source[offset + d] * factor


@cpu_jit
def _attend_tiles(
    q, q_strides, k_cache, v_cache, cache_strides, shape, tiles, block_table, columns, scale, v_scale, out,
    begin, end,
):  # fmt: skip
    """Attend for items ``begin : end``. The items are all tiles of KV head 0, then all tiles of KV head 1 …

    A tile is ``(row, first token, number of tokens, number of tokens that its first token sees)``.
    """
    num_heads, kv_heads, block_size, head_dim = shape
    heads_per_kv = num_heads // kv_heads
    rows = product_rows()
    most = (tiles[:, 2].max() * heads_per_kv + rows - 1) // rows * rows
    width = (head_dim + 2 * lanes() - 1) // (2 * lanes()) * 2 * lanes()
    queries, acc = aligned(most * head_dim), aligned(most * width)
    highest, total = np.empty(most, np.float32), aligned(most * lanes())
    keys, values = aligned(head_dim * _STEP_TOKENS), aligned(_STEP_TOKENS * width)
    scores = aligned(rows * _STEP_TOKENS)
    queries[:], keys[:], values[:] = _ZERO, _ZERO, _ZERO
    for item in range(begin, end):
        kv_head = item // tiles.shape[0]
        row, first_token, num_tokens, first_len = tiles[item % tiles.shape[0]]
        num_queries = num_tokens * heads_per_kv
        for i in range(num_queries):
            token, head = first_token + i // heads_per_kv, kv_head * heads_per_kv + i % heads_per_kv
            source = token * q_strides[0] + head * q_strides[1]
            _scale(q, source, scale, queries, i * head_dim, head_dim)
        acc[:], highest[:], total[:] = _ZERO, _NEGATIVE_INFINITY, _ZERO
        block_ids = block_table[row * columns : (row + 1) * columns]
        seen = first_len + num_tokens - 1
        for first in range(0, seen, _STEP_TOKENS):
            count = min(_STEP_TOKENS, seen - first)
            _gather(
                k_cache, v_cache, cache_strides, block_size, head_dim, kv_head, block_ids, first, count,
                keys, values,
            )  # fmt: skip
            _attend_step(
                queries, head_dim, num_queries, heads_per_kv, first_len, first, count, keys, values, scores,
                highest, total, acc,
            )  # fmt: skip
        for i in range(num_queries):
            token, head = first_token + i // heads_per_kv, kv_head * heads_per_kv + i % heads_per_kv
            target = (token * num_heads + head) * head_dim
            inverse = np.divide(v_scale, sum_of(load(total, i * lanes())))
            _scale(acc, i * width, inverse, out, target, head_dim)


def _cut_rows(bounds: list[int], seq_lens: list[int], heads_per_kv: int) -> np.ndarray:
    """Cut rows into the tiles that :func:`_attend_tiles` takes; padding rows have no tiles."""
    size = max(1, _TILE_QUERIES // heads_per_kv)
    tiles = [
        (row, token, min(size, bounds[row + 1] - token), seq_len - bounds[row + 1] + token + 1)
        for row, seq_len in enumerate(seq_lens)
        if seq_len > 0
        for token in range(bounds[row], bounds[row + 1], size)
    ]
    return np.array(tiles, dtype=np.int64).reshape(-1, 4)


def paged_attention_prefill_cpu(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    v_scale: float,
) -> torch.Tensor:
    """Compute :func:`kernels.attention.paged_attention_prefill.paged_attention_prefill` in float32.

    ``scale`` includes k_scale.
    """
    num_heads, head_dim = q.shape[1:]
    heads_per_kv = num_heads // k_cache.shape[1]
    tiles = _cut_rows(cu_seqlens.tolist(), seq_lens.tolist(), heads_per_kv)
    is_whole = int(tiles[:, 2].sum()) == len(q)
    out = torch.empty(q.shape, dtype=q.dtype) if is_whole else torch.zeros(q.shape, dtype=q.dtype)
    if len(tiles) == 0:
        return out
    num_items = len(tiles) * k_cache.shape[1]
    products = int(tiles[:, 2] @ tiles[:, 3]) * num_heads * head_dim
    _attend_tiles.parallel_for(
        num_items,
        1 + _GRAIN_PRODUCTS * num_items // products,
        FlatArray(q),
        q.stride()[:2],
        FlatArray(k_cache),
        FlatArray(v_cache),
        k_cache.stride()[:2],
        (num_heads, *k_cache.shape[1:]),
        tiles,
        FlatArray(block_table),
        block_table.stride(0),
        np.float32(scale),
        np.float32(v_scale),
        FlatArray(out),
    )
    return out
