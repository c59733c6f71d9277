"""Attention of decode rows over the paged KV cache on CPU.

The unit of work is a row's positions for one KV head, with all query heads that share this head. A thread
goes through the row's blocks in place, 64 tokens at a time, with an online softmax:

    scores  s = q . k, one vector of tokens (a group) at a time: each lane sums its token's dims
    softmax m' = max(m, max s), p = exp(s - m'), l' = l exp(m - m') + sum p
    values  acc' = acc exp(m - m') + p V, three queries by two vectors of acc in registers    out = acc / l

A group's keys and values stay in the first-level cache until all queries have used them. Rows leave the
caches between two steps, and blocks are scattered: the core's own prefetchers help only inside a block. So
each step prefetches the next one's groups, a few lines between its products: more at once would wait for one
another, and the products for them.

Groups that are not adjacent vectors of float32 (e4m3 caches, small blocks, odd head dims) are first copied,
64 tokens at a time, as float32 rows of whole vectors. A token's score may be computed although a query does
not see it, and is then dropped; its value is never used, so nothing after a query's length (stale block ids,
NaN) counts. Only the compiled code reads lengths, so that a call can be recorded (:mod:`kernels.cpu.graph`).
The order of a sum depends only on the tokens' places in their row.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.cpu.jit import as_array, as_flat_array, cpu_jit
from kernels.cpu.vector import (
    add,
    aligned,
    broadcast,
    dot_rows,
    exponential,
    lanes,
    largest_of,
    load,
    load_number,
    maximum,
    multiply,
    multiply_add,
    prefetch,
    splat,
    store,
    subtract,
    sum_of,
)

_STEP_TOKENS = 64
_GRAIN_HEADS = 16
"""A thread's minimum share, in rows times KV heads: about 100 µs at a few hundred tokens. The share does not
depend on the rows' lengths, since the host does not know them."""

_ZERO, _ONE, _NEGATIVE_INFINITY = np.float32(0), np.float32(1), np.float32(-np.inf)


@cpu_jit
def _score(queries, width, num_queries, keys, places, stride, count, scores, ahead, num_ahead):
    """Compute ``scores[i * 64 + t] = query i . key t`` for ``count`` tokens, rounded up to whole groups."""
    w = lanes()
    share = (width // w + num_queries - 1) // num_queries * w  # columns that are prefetched beside a query
    for t in range(0, count, w):
        g = t // w
        fetched, distance = share if g < num_ahead else 0, ahead[g] - places[g]
        for i in range(num_queries):
            begin, end = i * fetched, (i + 1) * fetched
            row = dot_rows(queries, i * width, keys, places[g], stride, width, distance, begin, end)
            store(scores, i * _STEP_TOKENS + t, row)


@cpu_jit
def _weigh(scores, lives, first, count, highest, total, acc, width):
    """Turn scores into weights, 0 for tokens that a query does not see; rescale its earlier sums."""
    w = lanes()
    for i in range(lives.shape[0]):
        row, a, live = i * _STEP_TOKENS, i * width, min(count, lives[i] - first)
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
def _add_pair(weights, p0, p1, n0, n1, values, v, stride, acc, a, width, distance):
    """Add a group's values to the sums of two queries, ``acc[a:]`` and ``acc[a + width:]``.

    The queries see n0 and n1 >= n0 tokens. Even tokens are added in one chain, odd tokens in another.
    Unless it is 0, the values at this distance are prefetched meanwhile.
    """
    w = lanes()
    for d in range(0, width, 2 * w):
        o0, o1 = a + d, a + width + d
        a00, a01, a10, a11 = load(acc, o0), load(acc, o0 + w), load(acc, o1), load(acc, o1 + w)
        b00, b01, b10, b11 = splat(_ZERO), splat(_ZERO), splat(_ZERO), splat(_ZERO)
        t, u = 0, v + d
        while t + 2 <= n0:
            if distance != 0:
                prefetch(values, u + distance)
                prefetch(values, u + w + distance)
            v0, v1 = load(values, u), load(values, u + w)
            x0, x1 = broadcast(weights, p0 + t), broadcast(weights, p1 + t)
            a00, a01 = multiply_add(x0, v0, a00), multiply_add(x0, v1, a01)
            a10, a11 = multiply_add(x1, v0, a10), multiply_add(x1, v1, a11)
            u += stride
            if distance != 0:
                prefetch(values, u + distance)
                prefetch(values, u + w + distance)
            v0, v1 = load(values, u), load(values, u + w)
            x0, x1 = broadcast(weights, p0 + t + 1), broadcast(weights, p1 + t + 1)
            b00, b01 = multiply_add(x0, v0, b00), multiply_add(x0, v1, b01)
            b10, b11 = multiply_add(x1, v0, b10), multiply_add(x1, v1, b11)
            u += stride
            t += 2
        while t < n1:
            if distance != 0:
                prefetch(values, u + distance)
                prefetch(values, u + w + distance)
            v0, v1 = load(values, u), load(values, u + w)
            x0, x1 = broadcast(weights, p0 + t), broadcast(weights, p1 + t)
            if t < n0:  # the last of an odd number
                a00, a01 = multiply_add(x0, v0, a00), multiply_add(x0, v1, a01)
            if t % 2 == 0:
                a10, a11 = multiply_add(x1, v0, a10), multiply_add(x1, v1, a11)
            else:
                b10, b11 = multiply_add(x1, v0, b10), multiply_add(x1, v1, b11)
            u += stride
            t += 1
        store(acc, o0, add(a00, b00))
        store(acc, o0 + w, add(a01, b01))
        store(acc, o1, add(a10, b10))
        store(acc, o1 + w, add(a11, b11))


@cpu_jit
def _add_three(weights, p, count, values, v, stride, acc, a, width, distance):
    """Like :func:`_add_pair`, in the same order, for three queries that see all ``count`` tokens."""
    w = lanes()
    p1, p2 = p + _STEP_TOKENS, p + 2 * _STEP_TOKENS
    for d in range(0, width, 2 * w):
        o0, o1, o2 = a + d, a + width + d, a + 2 * width + d
        a00, a01, a10, a11 = load(acc, o0), load(acc, o0 + w), load(acc, o1), load(acc, o1 + w)
        a20, a21 = load(acc, o2), load(acc, o2 + w)
        b00, b01, b10, b11 = splat(_ZERO), splat(_ZERO), splat(_ZERO), splat(_ZERO)
        b20, b21 = splat(_ZERO), splat(_ZERO)
        t, u = 0, v + d
        while t + 2 <= count:
            if distance != 0:
                prefetch(values, u + distance)
                prefetch(values, u + w + distance)
            v0, v1 = load(values, u), load(values, u + w)
            x0, x1, x2 = broadcast(weights, p + t), broadcast(weights, p1 + t), broadcast(weights, p2 + t)
            a00, a01 = multiply_add(x0, v0, a00), multiply_add(x0, v1, a01)
            a10, a11 = multiply_add(x1, v0, a10), multiply_add(x1, v1, a11)
            a20, a21 = multiply_add(x2, v0, a20), multiply_add(x2, v1, a21)
            u += stride
            if distance != 0:
                prefetch(values, u + distance)
                prefetch(values, u + w + distance)
            v0, v1 = load(values, u), load(values, u + w)
            x0, x1 = broadcast(weights, p + t + 1), broadcast(weights, p1 + t + 1)
            x2 = broadcast(weights, p2 + t + 1)
            b00, b01 = multiply_add(x0, v0, b00), multiply_add(x0, v1, b01)
            b10, b11 = multiply_add(x1, v0, b10), multiply_add(x1, v1, b11)
            b20, b21 = multiply_add(x2, v0, b20), multiply_add(x2, v1, b21)
            u += stride
            t += 2
        if t < count:
            if distance != 0:
                prefetch(values, u + distance)
                prefetch(values, u + w + distance)
            v0, v1 = load(values, u), load(values, u + w)
            x0, x1, x2 = broadcast(weights, p + t), broadcast(weights, p1 + t), broadcast(weights, p2 + t)
            a00, a01 = multiply_add(x0, v0, a00), multiply_add(x0, v1, a01)
            a10, a11 = multiply_add(x1, v0, a10), multiply_add(x1, v1, a11)
            a20, a21 = multiply_add(x2, v0, a20), multiply_add(x2, v1, a21)
        store(acc, o0, add(a00, b00))
        store(acc, o0 + w, add(a01, b01))
        store(acc, o1, add(a10, b10))
        store(acc, o1 + w, add(a11, b11))
        store(acc, o2, add(a20, b20))
        store(acc, o2 + w, add(a21, b21))


@cpu_jit
def _add_values(weights, lives, first, count, values, places, stride, acc, width, ahead, num_ahead):
    """Add the values of ``count`` tokens from ``first`` on to the sums of all queries, up to three at a time.

    Later queries of a row see more tokens, so three that start with one which sees the whole group all do.
    """
    w, num_queries = lanes(), lives.shape[0]
    for t in range(0, count, w):
        g, left = t // w, min(w, count - t)
        i = 0
        while i < num_queries:
            p, n0, remaining = i * _STEP_TOKENS + t, max(0, min(left, lives[i] - first - t)), num_queries - i
            together = 3 if n0 == left and remaining >= 3 and remaining != 4 else min(2, remaining)
            distance = ahead[g] - places[g] if i == 0 and g < num_ahead else 0
            if together == 3:
                _add_three(weights, p, left, values, places[g], stride, acc, i * width, width, distance)
            else:
                n1 = n0 if together == 1 else max(0, min(left, lives[i + 1] - first - t))
                _add_pair(
                    weights, p, p + _STEP_TOKENS, n0, n1, values, places[g], stride, acc, i * width, width,
                    distance,
                )  # fmt: skip
            i += together


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
def _find_groups(cache_strides, block_size, head_dim, kv_head, block_ids, first, seen, places):
    """Find the groups of the step from token ``first`` on; return how many there are."""
    w, g = lanes(), 0
    for token in range(first, min(seen, first + _STEP_TOKENS), w):
        places[g] = _place(cache_strides, block_size, head_dim, kv_head, block_ids, token)
        g += 1
    return g


@cpu_jit
def _attend_row(
    k_cache, v_cache, cache_strides, block_size, head_dim, kv_head, block_ids, lives, next_head, next_ids,
    next_seen, queries, width, scores, highest, total, acc, places, ahead,
):  # fmt: skip
    """Attend from a row's queries to the tokens of one KV head, in place. Query i sees ``lives[i]`` tokens.

    ``next_`` is what this thread attends to then, so that its first step is prefetched as well.
    """
    seen = lives[-1]
    _find_groups(cache_strides, block_size, head_dim, kv_head, block_ids, 0, seen, places)
    for first in range(0, seen, _STEP_TOKENS):
        count, then = min(_STEP_TOKENS, seen - first), first + _STEP_TOKENS
        if then < seen:
            num_ahead = _find_groups(
                cache_strides, block_size, head_dim, kv_head, block_ids, then, seen, ahead
            )
        else:
            num_ahead = _find_groups(
                cache_strides, block_size, head_dim, next_head, next_ids, 0, next_seen, ahead
            )
        _score(queries, width, lives.shape[0], k_cache, places, head_dim, count, scores, ahead, num_ahead)
        _weigh(scores, lives, first, count, highest, total, acc, width)
        _add_values(scores, lives, first, count, v_cache, places, head_dim, acc, width, ahead, num_ahead)
        places[:] = ahead


@cpu_jit
def _attend_copied_row(
    k_cache, v_cache, cache_strides, block_size, head_dim, kv_head, block_ids, lives,
    queries, width, scores, highest, total, acc, places, keys, values,
):  # fmt: skip
    """Like :func:`_attend_row`, for caches whose tokens are first copied to float32 rows of whole vectors."""
    w, seen = lanes(), lives[-1]
    for g in range(places.shape[0]):
        places[g] = g * w * width
    for first in range(0, seen, _STEP_TOKENS):
        count = min(_STEP_TOKENS, seen - first)
        for t in range(count):
            place = _place(cache_strides, block_size, head_dim, kv_head, block_ids, first + t)
            _copy_token(k_cache, place, head_dim, keys, t * width)
            _copy_token(v_cache, place, head_dim, values, t * width)
        _score(queries, width, lives.shape[0], keys, places, width, count, scores, places, 0)
        _weigh(scores, lives, first, count, highest, total, acc, width)
        _add_values(scores, lives, first, count, values, places, width, acc, width, places, 0)


@cpu_jit
def _attend_rows(
    q, q_strides, k_cache, v_cache, cache_strides, shape, seq_lens, block_table, columns, scale, v_scale,
    is_narrow, out, begin, end,
):  # fmt: skip
    """Attend for items ``begin : end``. Item ``r * KVH + h`` is decode row r's positions with KV head h.

    ``shape`` is T, QH, KVH, block_size, D, as in paged_attention_decode.py.
    """
    num_positions, num_heads, kv_heads, block_size, head_dim = shape
    heads_per_kv, w = num_heads // kv_heads, lanes()
    num_queries = num_positions * heads_per_kv
    room = num_queries + 1  # a query that is added alone has unused room beside it
    width = (head_dim + 2 * w - 1) // (2 * w) * 2 * w
    is_direct = is_narrow == 0 and head_dim == width and block_size % w == 0
    queries, acc = aligned(room * width), aligned(room * width)
    total, scores = aligned(num_queries * w), aligned(room * _STEP_TOKENS)
    highest, lives = np.empty(num_queries, np.float32), np.empty(num_queries, np.int64)
    staged = 0 if is_direct else _STEP_TOKENS * width
    keys, values, places = aligned(staged), aligned(staged), np.empty(_STEP_TOKENS // w, np.int64)
    ahead = np.zeros(_STEP_TOKENS // w, np.int64)
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
                k_cache, v_cache, cache_strides, block_size, head_dim, kv_head, block_ids, lives,
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
        as_flat_array(q),
        q.stride()[:3],
        as_flat_array(k_cache),
        as_flat_array(v_cache),
        k_cache.stride()[:2],
        (num_positions, num_heads, *k_cache.shape[1:]),
        as_array(seq_lens),
        as_flat_array(block_table),
        block_table.stride(0),
        np.float32(scale),
        np.float32(v_scale),
        int(k_cache.dtype != torch.float32),
        as_flat_array(out),
    )
    return out
