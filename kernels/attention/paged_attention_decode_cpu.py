"""Attention of decode rows over the paged KV cache on CPU.

The unit of work is a row's positions for one KV head, with all query heads that share this head. A thread
goes through the row's blocks in place, 64 tokens at a time, with an online softmax:

    scores  s = q . k, four tokens at a time in vector registers
    softmax m' = max(m, max s), p = exp(s - m'), l' = l exp(m - m') + sum p
    values  acc' = acc exp(m - m') + p V, four vectors of acc in registers        out = acc / l at the end

Data of an e4m3 cache is first widened to float32: 64 tokens at a time, once for all queries that see any of
them. For other caches nothing is gathered, copied or masked. A query's loop ends at its own length, so
nothing after that length (stale block ids, NaN) is ever read. Only the compiled code reads lengths, so that a
call can be recorded (:mod:`kernels.cpu.graph`). The order of a sum depends only on the tokens' places in
their row.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.cpu.jit import as_array, as_flat_array, cpu_jit
from kernels.cpu.vector import (
    add,
    aligned,
    broadcast,
    exponential,
    lanes,
    largest_of,
    load,
    load_number,
    maximum,
    multiply,
    multiply_add,
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
def _score(query, q, keys, k, head_dim, num_tokens, scores, s):
    """Compute ``scores[s + t] = query[q:] . keys[k + t * head_dim:]`` for ``num_tokens`` adjacent tokens."""
    w = lanes()
    whole = head_dim - head_dim % w
    t = 0
    while t + 4 <= num_tokens:
        k0 = k + t * head_dim
        k1, k2, k3 = k0 + head_dim, k0 + 2 * head_dim, k0 + 3 * head_dim
        s0, s1, s2, s3 = splat(_ZERO), splat(_ZERO), splat(_ZERO), splat(_ZERO)
        for d in range(0, whole, w):
            x = load(query, q + d)
            s0, s1 = multiply_add(x, load(keys, k0 + d), s0), multiply_add(x, load(keys, k1 + d), s1)
            s2, s3 = multiply_add(x, load(keys, k2 + d), s2), multiply_add(x, load(keys, k3 + d), s3)
        a0, a1, a2, a3 = sum_of(s0), sum_of(s1), sum_of(s2), sum_of(s3)
        for d in range(whole, head_dim):
            x_d = query[q + d]
            a0, a1 = a0 + x_d * load_number(keys, k0 + d), a1 + x_d * load_number(keys, k1 + d)
            a2, a3 = a2 + x_d * load_number(keys, k2 + d), a3 + x_d * load_number(keys, k3 + d)
        scores[s + t], scores[s + t + 1], scores[s + t + 2], scores[s + t + 3] = a0, a1, a2, a3
        t += 4
    while t < num_tokens:
        k0 = k + t * head_dim
        s0 = splat(_ZERO)
        for d in range(0, whole, w):
            s0 = multiply_add(load(query, q + d), load(keys, k0 + d), s0)
        a0 = sum_of(s0)
        for d in range(whole, head_dim):
            a0 += query[q + d] * load_number(keys, k0 + d)
        scores[s + t] = a0
        t += 1


@cpu_jit
def _weigh(scores, live, highest, total, i, acc, a, head_dim):
    """Turn ``live`` scores into weights relative to the new maximum; rescale query i's earlier sums."""
    w = lanes()
    reach = -(-live // w) * w
    scores[live:reach] = _NEGATIVE_INFINITY
    largest = load(scores, 0)
    for t in range(w, reach, w):
        largest = maximum(load(scores, t), largest)
    old_highest = highest[i]
    new_highest = max(old_highest, largest_of(largest))
    rescale = exponential(subtract(splat(old_highest), splat(new_highest)))
    shift, added = splat(new_highest), splat(_ZERO)
    for t in range(0, reach, w):
        weight = exponential(subtract(load(scores, t), shift))
        store(scores, t, weight)
        added = add(added, weight)
    highest[i] = new_highest
    for d in range(0, head_dim, w):
        store(acc, a + d, multiply(load(acc, a + d), rescale))
    store(total, i * w, add(multiply(load(total, i * w), rescale), added))


@cpu_jit
def _add_values(weights, first, values, v, head_dim, num_tokens, acc, a):
    """Add ``sum over t of weights[first + t] values[v + t * head_dim:]`` to ``acc[a:]``, token by token."""
    w = lanes()
    whole = head_dim - head_dim % w
    d = 0
    while d + 4 * w <= whole:
        o = a + d
        a0, a1, a2, a3 = load(acc, o), load(acc, o + w), load(acc, o + 2 * w), load(acc, o + 3 * w)
        for t in range(num_tokens):
            x, u = broadcast(weights, first + t), v + t * head_dim + d
            a0, a1 = multiply_add(x, load(values, u), a0), multiply_add(x, load(values, u + w), a1)
            u += 2 * w
            a2, a3 = multiply_add(x, load(values, u), a2), multiply_add(x, load(values, u + w), a3)
        store(acc, o, a0)
        store(acc, o + w, a1)
        store(acc, o + 2 * w, a2)
        store(acc, o + 3 * w, a3)
        d += 4 * w
    while d < whole:
        a0 = load(acc, a + d)
        for t in range(num_tokens):
            a0 = multiply_add(broadcast(weights, first + t), load(values, v + t * head_dim + d), a0)
        store(acc, a + d, a0)
        d += w
    while d < head_dim:
        total = acc[a + d]
        for t in range(num_tokens):
            total += weights[first + t] * load_number(values, v + t * head_dim + d)
        acc[a + d] = total
        d += 1


@cpu_jit
def _attend_row(
    k_cache, v_cache, cache_strides, block_size, head_dim, kv_head, block_ids, heads_per_kv, num_queries,
    first_len, queries, width, scores, highest, total, acc,
):  # fmt: skip
    """Attend from a row's queries to the tokens of one KV head.

    Query i sees ``first_len + i // heads_per_kv`` tokens; its sums begin at ``acc[i * width]``.
    """
    w = lanes()
    for i in range(num_queries):
        highest[i] = _NEGATIVE_INFINITY
        store(total, i * w, splat(_ZERO))
    acc[: num_queries * width] = _ZERO
    for first in range(0, first_len + num_queries // heads_per_kv - 1, _STEP_TOKENS):
        for i in range(num_queries):
            live = min(_STEP_TOKENS, first_len + i // heads_per_kv - first)
            t = 0
            while t < live:
                inside = (first + t) % block_size
                run = min(live - t, block_size - inside)
                base = block_ids[(first + t) // block_size] * cache_strides[0] + kv_head * cache_strides[1]
                base += inside * head_dim
                _score(queries, i * width, k_cache, base, head_dim, run, scores, t)
                t += run
            if live <= 0:
                continue
            _weigh(scores, live, highest, total, i, acc, i * width, width)
            t = 0
            while t < live:
                inside = (first + t) % block_size
                run = min(live - t, block_size - inside)
                base = block_ids[(first + t) // block_size] * cache_strides[0] + kv_head * cache_strides[1]
                base += inside * head_dim
                _add_values(scores, t, v_cache, base, head_dim, run, acc, i * width)
                t += run


@cpu_jit
def _widen_step(cache, cache_strides, block_size, head_dim, kv_head, block_ids, first, count, wide):
    """Convert ``count`` tokens of one KV head to float32: token ``first + t`` to ``wide[t * head_dim:]``."""
    whole = head_dim - head_dim % lanes()
    for t in range(count):
        inside, block = (first + t) % block_size, block_ids[(first + t) // block_size]
        source = block * cache_strides[0] + kv_head * cache_strides[1] + inside * head_dim
        for d in range(0, whole, lanes()):
            store(wide, t * head_dim + d, load(cache, source + d))
        for d in range(whole, head_dim):
            wide[t * head_dim + d] = load_number(cache, source + d)


@cpu_jit
def _attend_narrow_row(
    k_cache, v_cache, cache_strides, block_size, head_dim, kv_head, block_ids, heads_per_kv, num_queries,
    first_len, queries, width, scores, highest, total, acc, keys, values,
):  # fmt: skip
    """Like :func:`_attend_row`, for caches that :func:`_widen_step` has to widen."""
    w, seen = lanes(), first_len + num_queries // heads_per_kv - 1
    for i in range(num_queries):
        highest[i] = _NEGATIVE_INFINITY
        store(total, i * w, splat(_ZERO))
    acc[: num_queries * width] = _ZERO
    for first in range(0, seen, _STEP_TOKENS):
        count = min(_STEP_TOKENS, seen - first)
        _widen_step(k_cache, cache_strides, block_size, head_dim, kv_head, block_ids, first, count, keys)
        _widen_step(v_cache, cache_strides, block_size, head_dim, kv_head, block_ids, first, count, values)
        for i in range(num_queries):
            live = min(count, first_len + i // heads_per_kv - first)
            if live > 0:
                _score(queries, i * width, keys, 0, head_dim, live, scores, 0)
                _weigh(scores, live, highest, total, i, acc, i * width, width)
                _add_values(scores, 0, values, 0, head_dim, live, acc, i * width)


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
    width = -(-head_dim // w) * w
    queries, acc = aligned(num_queries * width), aligned(num_queries * width)
    total, scores = aligned(num_queries * w), aligned(_STEP_TOKENS)
    highest = np.empty(num_queries, np.float32)
    room = _STEP_TOKENS * head_dim if is_narrow else 0
    keys, values = aligned(room), aligned(room)
    for item in range(begin, end):
        row, kv_head = item // kv_heads, item % kv_heads
        for i in range(num_queries):
            position, head = i // heads_per_kv, kv_head * heads_per_kv + i % heads_per_kv
            source = row * q_strides[0] + position * q_strides[1] + head * q_strides[2]
            for d in range(head_dim):
                queries[i * width + d] = q[source + d] * scale
        first_len = seq_lens[row] - num_positions + 1
        if seq_lens[row] > 0 and is_narrow:
            _attend_narrow_row(
                k_cache, v_cache, cache_strides, block_size, head_dim, kv_head,
                block_table[row * columns :], heads_per_kv, num_queries, first_len,
                queries, width, scores, highest, total, acc, keys, values,
            )  # fmt: skip
        elif seq_lens[row] > 0:
            _attend_row(
                k_cache, v_cache, cache_strides, block_size, head_dim, kv_head,
                block_table[row * columns :], heads_per_kv, num_queries, first_len,
                queries, width, scores, highest, total, acc,
            )  # fmt: skip
        for i in range(num_queries):
            position, head = i // heads_per_kv, kv_head * heads_per_kv + i % heads_per_kv
            target = ((row * num_positions + position) * num_heads + head) * head_dim
            is_padding = seq_lens[row] == 0
            weight = _ONE if is_padding else sum_of(load(total, i * w))
            inverse = _ZERO if is_padding or weight == _ZERO else np.divide(v_scale, weight)
            for d in range(head_dim):
                out[target + d] = _ZERO if is_padding else acc[i * width + d] * inverse


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
    out = torch.empty(q.shape)
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
        as_array(out).ravel(),
    )
    return out
