"""Attention of decode rows over the paged KV cache on CPU.

The unit of work is a row's positions for one KV head, with all query heads that share this head. A thread
goes through the row's blocks in place, eight pages (of 16 adjacent tokens) at a time, four with AVX2, with an
online softmax:

    scores  s = q . k, eight tokens by up to three queries in registers: sums are eight lanes wide, then added
    softmax m' = max(m, max s), p = exp(s - m'), l' = l exp(m - m') + sum p
    values  acc' = acc exp(m - m') + p V, three queries by four vectors of acc in registers    out = acc / l

Rows leave the caches between two steps, and blocks are scattered. One page after another is read at a third
of the memory's rate: the core's own prefetchers stop at a page's end, and what a program prefetches takes the
same few places as its loads. Therefore the pages of a step are read side by side, two tokens of each in
turn, so that as many of the core's prefetchers run at once. Besides, each key prefetches the value of its
token, and each value the key in its place of the next step: one line with each product, since many at once
wait for one another.

Pages that are not adjacent vectors of float32 (e4m3 caches, small blocks, odd head dims) are first copied,
a step at a time, as float32 rows of whole vectors. A token's score may be computed although a query does
not see it, and is then dropped; its value is never used, so nothing after a query's length (stale block ids,
NaN) counts. Only the compiled code reads lengths, so that a call can be recorded (:mod:`kernels.cpu.graph`).
The order of a sum depends only on the tokens' places in their row.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.attention.page_vectors import (
    add_pages_1,
    add_pages_2,
    add_pages_3,
    order_pages,
    score_page,
    score_pages_1,
    score_pages_2,
    score_pages_3,
)
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
)

_PAGE_TOKENS = 16
_STEP_VECTORS = 8
"""Vectors of scores of a step, which has lanes() / 2 pages."""
_GRAIN_HEADS = 16
"""A thread's minimum share, in rows times KV heads: about 100 µs at a few hundred tokens. The share does not
depend on the rows' lengths, since the host does not know them."""

_ZERO, _ONE, _NEGATIVE_INFINITY = np.float32(0), np.float32(1), np.float32(-np.inf)


@cpu_jit
def _score(queries, width, num_queries, keys, places, stride, count, scores, ahead):
    """Compute the scores of ``count`` tokens, rounded up to whole pages, one row of a step for each query.

    Their values are ``ahead`` elements after the keys, and are prefetched meanwhile unless that is 0.
    """
    w = lanes()
    step = _STEP_VECTORS * w
    if count < step:
        share = (width // 16 + num_queries - 1) // num_queries * 16 if ahead != 0 else 0  # columns of a query
        for t in range(0, count, w):
            place = places[t // _PAGE_TOKENS] + t % _PAGE_TOKENS * stride
            for i in range(num_queries):
                begin, q, s = i * share, i * width, i * step + t
                score_page(queries, q, keys, place, stride, width, scores, s, ahead, begin, begin + share)
        return
    groups = (num_queries + 2) // 3
    share = (width // 16 + groups - 1) // groups * 16 if ahead != 0 else 0
    for t in range(0, _PAGE_TOKENS, 2):
        o = t * stride
        for i in range(0, num_queries, 3):
            n, q, s = num_queries - i, i * width, i * step + t // 2 * w
            begin, end = i // 3 * share, (i // 3 + 1) * share
            if n >= 3:
                score_pages_3(queries, q, keys, places, o, stride, width, scores, s, ahead, begin, end)
            elif n == 2:
                score_pages_2(queries, q, keys, places, o, stride, width, scores, s, ahead, begin, end)
            else:
                score_pages_1(queries, q, keys, places, o, stride, width, scores, s, ahead, begin, end)
    for i in range(num_queries):
        order_pages(scores, i * step)


@cpu_jit
def _weigh(scores, lives, first, count, highest, total, acc, width):
    """Turn scores into weights, 0 for tokens that a query does not see; rescale its earlier sums."""
    w = lanes()
    for i in range(lives.shape[0]):
        row, a, live = i * _STEP_VECTORS * w, i * width, min(count, lives[i] - first)
        if live <= 0:
            continue
        end = row + (count + w - 1) // w * w
        for t in range(row + live, end):
            scores[t] = _NEGATIVE_INFINITY
        largest = load(scores, row)
        for t in range(row + w, end, w):
            largest = maximum(load(scores, t), largest)
        old_highest, added = highest[i], load(total, i * w)
        new_highest = max(old_highest, largest_of(largest))
        if new_highest != old_highest:
            highest[i] = new_highest
            rescale = exponential(subtract(splat(old_highest), splat(new_highest)))
            added = multiply(added, rescale)
            for d in range(a, a + width, w):
                store(acc, d, multiply(load(acc, d), rescale))
        shift = splat(new_highest)
        for t in range(row, end, w):
            weight = exponential(subtract(load(scores, t), shift))
            store(scores, t, weight)
            added = add(added, weight)
        store(total, i * w, added)


@cpu_jit
def _add_values(weights, lives, first, count, values, places, stride, acc, width, ahead, is_ahead):
    """Add the values of ``count`` tokens from ``first`` on to the sums of all queries, up to three at a time.

    The order is the first token of each page, then the second of each page, and so on. If there are many
    queries, they take a few tokens of each page in turns, which meanwhile stay in the first-level cache. If
    ``is_ahead`` is 1, the pages ``ahead`` are prefetched.
    """
    w, num_queries = lanes(), lives.shape[0]
    step, fetched = _STEP_VECTORS * w, w // 2 * is_ahead
    together = _PAGE_TOKENS if num_queries <= 3 else 4
    for t in range(0, _PAGE_TOKENS, together):
        i = 0
        while i < num_queries:
            seen, n = min(count, lives[i] - first), 1
            while n < 3 and i + n < num_queries and min(count, lives[i + n] - first) == seen:
                n += 1
            p, a = i * step, i * width
            bounds = t, t + together, seen, fetched * i // num_queries, fetched * (i + n) // num_queries
            if n == 3:
                add_pages_3(weights, p, values, places, stride, acc, a, width, ahead, bounds)
            elif n == 2:
                add_pages_2(weights, p, values, places, stride, acc, a, width, ahead, bounds)
            else:
                add_pages_1(weights, p, values, places, stride, acc, a, width, ahead, bounds)
            i += n


@cpu_jit
def _scale(source, s, factor, target, t, count):
    """Compute ``target[t:] = factor * source[s:]`` for ``count`` elements."""
    whole = count - count % lanes()
    for d in range(0, whole, lanes()):
        store(target, t + d, multiply(load(source, s + d), splat(factor)))
    for d in range(whole, count):
        target[t + d] = source[s + d] * factor


@cpu_jit
def _copy_token(cache, source, head_dim, target, t):
    """Copy a token as float32."""
    whole = head_dim - head_dim % lanes()
    for d in range(0, whole, lanes()):
        store(target, t + d, load(cache, source + d))
    for d in range(whole, head_dim):
        target[t + d] = load_number(cache, source + d)


@cpu_jit
def _place(cache_strides, block_size, head_dim, kv_head, block_ids, token):
    """Return the index in the caches of a token's first element."""
    block = block_ids[token // block_size]
    return block * cache_strides[0] + kv_head * cache_strides[1] + token % block_size * head_dim


@cpu_jit
def _find_pages(cache_strides, block_size, head_dim, kv_head, block_ids, first, seen, places, shift):
    """Find the pages of the step from token ``first`` on, ``shift`` elements away; return how many there are.

    Places of absent pages are those of the first page, so that they may be prefetched too.
    """
    w, g = lanes(), 0
    for token in range(first, min(seen, first + _STEP_VECTORS * w), _PAGE_TOKENS):
        places[g] = _place(cache_strides, block_size, head_dim, kv_head, block_ids, token) + shift
        g += 1
    for k in range(g, w // 2):
        places[k] = places[0]
    return g


@cpu_jit
def _attend_row(
    k_cache, v_cache, to_values, cache_strides, block_size, head_dim, kv_head, block_ids, lives, next_head,
    next_ids, next_seen, queries, width, scores, highest, total, acc, places, ahead,
):  # fmt: skip
    """Attend from a row's queries to the tokens of one KV head, in place. Query i sees ``lives[i]`` tokens.

    ``next_`` is what this thread attends to then, so that its first step is prefetched as well. Values are
    ``to_values`` elements after their keys.
    """
    seen, step, num_pages = lives[-1], _STEP_VECTORS * lanes(), lanes() // 2
    _find_pages(cache_strides, block_size, head_dim, kv_head, block_ids, 0, seen, places, 0)
    for first in range(0, seen, step):
        count, then = min(step, seen - first), first + step
        if then < seen:
            num_ahead = _find_pages(
                cache_strides, block_size, head_dim, kv_head, block_ids, then, seen, ahead, -to_values
            )
        else:
            num_ahead = _find_pages(
                cache_strides, block_size, head_dim, next_head, next_ids, 0, next_seen, ahead, -to_values
            )
        _score(queries, width, lives.shape[0], k_cache, places, head_dim, count, scores, to_values)
        _weigh(scores, lives, first, count, highest, total, acc, width)
        _add_values(
            scores, lives, first, count, v_cache, places, head_dim, acc, width, ahead, int(num_ahead > 0)
        )
        for g in range(num_pages):
            places[g] = ahead[g] + to_values


@cpu_jit
def _attend_copied_row(
    k_cache, v_cache, cache_strides, block_size, head_dim, kv_head, block_ids, lives,
    queries, width, scores, highest, total, acc, places, keys, values,
):  # fmt: skip
    """Like :func:`_attend_row`, for caches whose tokens are first copied to float32 rows of whole vectors."""
    w, seen = lanes(), lives[-1]
    for g in range(w // 2):
        places[g] = g * _PAGE_TOKENS * width
    for first in range(0, seen, _STEP_VECTORS * w):
        count = min(_STEP_VECTORS * w, seen - first)
        for t in range(count):
            place = _place(cache_strides, block_size, head_dim, kv_head, block_ids, first + t)
            _copy_token(k_cache, place, head_dim, keys, t * width)
            _copy_token(v_cache, place, head_dim, values, t * width)
        _score(queries, width, lives.shape[0], keys, places, width, count, scores, 0)
        _weigh(scores, lives, first, count, highest, total, acc, width)
        _add_values(scores, lives, first, count, values, places, width, acc, width, places, 0)


@cpu_jit
def _attend_rows(
    q, q_strides, k_cache, v_cache, to_values, cache_strides, shape, seq_lens, block_table, columns, scale,
    v_scale, is_narrow, out, begin, end,
):  # fmt: skip
    """Attend for items ``begin : end``. Item ``r * KVH + h`` is decode row r's positions with KV head h.

    ``shape`` is T, QH, KVH, block_size, D, as in paged_attention_decode.py.
    """
    num_positions, num_heads, kv_heads, block_size, head_dim = shape
    heads_per_kv, w = num_heads // kv_heads, lanes()
    num_queries = num_positions * heads_per_kv
    room = num_queries + 1  # a query that is added alone has unused room beside it
    width, step = (head_dim + 2 * w - 1) // (2 * w) * 2 * w, _STEP_VECTORS * w
    is_direct = is_narrow == 0 and head_dim == width and block_size % _PAGE_TOKENS == 0
    queries, acc = aligned(room * width), aligned(room * width)
    total, scores = aligned(num_queries * w), aligned(room * step)
    highest, lives = np.empty(num_queries, np.float32), np.empty(num_queries, np.int64)
    staged = 0 if is_direct else step * width
    keys, values, places = aligned(staged), aligned(staged), np.empty(w // 2, np.int64)
    ahead = np.zeros(w // 2, np.int64)
    queries[:], keys[:], values[:], scores[:] = _ZERO, _ZERO, _ZERO, _ZERO
    for item in range(begin, end):
        row, kv_head = item // kv_heads, item % kv_heads
        seq_len = seq_lens[row]
        target = (row * num_positions * num_heads + kv_head * heads_per_kv) * head_dim
        if seq_len == 0:
            for _ in range(num_positions):
                out[target : target + heads_per_kv * head_dim] = _ZERO
                target += num_heads * head_dim
            continue
        i = 0
        for position in range(num_positions):
            source = row * q_strides[0] + position * q_strides[1] + kv_head * heads_per_kv * q_strides[2]
            for _ in range(heads_per_kv):
                lives[i], highest[i] = seq_len - num_positions + 1 + position, _NEGATIVE_INFINITY
                _scale(q, source, scale, queries, i * width, head_dim)
                source += q_strides[2]
                i += 1
        acc[:], total[:] = _ZERO, _ZERO
        block_ids = block_table[row * columns :]
        if is_direct:
            then = min(item + 1, end - 1)
            _attend_row(
                k_cache, v_cache, to_values, cache_strides, block_size, head_dim, kv_head, block_ids, lives,
                then % kv_heads, block_table[then // kv_heads * columns :],
                seq_lens[then // kv_heads] if then > item else 0,
                queries, width, scores, highest, total, acc, places, ahead,
            )  # fmt: skip
        else:
            _attend_copied_row(
                k_cache, v_cache, cache_strides, block_size, head_dim, kv_head, block_ids, lives,
                queries, width, scores, highest, total, acc, places, keys, values,
            )  # fmt: skip
        i = 0
        for _ in range(num_positions):
            for head in range(heads_per_kv):
                weight = sum_of(load(total, i * w))
                inverse = _ZERO if weight == _ZERO else np.divide(v_scale, weight)
                _scale(acc, i * width, inverse, out, target + head * head_dim, head_dim)
                i += 1
            target += num_heads * head_dim


def paged_attention_decode_cpu(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    v_scale: float,
) -> torch.Tensor:
    """Compute :func:`kernels.attention.paged_attention_decode.paged_attention_decode` in float32.

    ``scale`` includes k_scale.
    """
    num_rows, num_positions, num_heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _attend_rows.parallel_for(
        num_rows * k_cache.shape[1],
        _GRAIN_HEADS,
        FlatArray(q),
        q.stride()[:3],
        FlatArray(k_cache),
        FlatArray(v_cache),
        (v_cache.data_ptr() - k_cache.data_ptr()) // k_cache.element_size(),
        k_cache.stride()[:2],
        (num_positions, num_heads, *k_cache.shape[1:]),
        seq_lens,
        FlatArray(block_table),
        block_table.stride(0),
        np.float32(scale),
        np.float32(v_scale),
        int(k_cache.dtype != torch.float32),
        FlatArray(out),
    )
    return out
