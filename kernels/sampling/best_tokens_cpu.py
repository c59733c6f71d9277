"""Finds the best tokens of a row of logits on a CPU, without a sort.

Better means: a larger logit, or the same logit and a lower token id. Rows are flat float32 arrays.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.compiler import cpu_function
from kernels.cpu.vector import lanes, largest_of, load, maximum, multiply_add, splat, store, sum_of
from kernels.sampling.race_vectors import count_at_least, first_lane, lanes_at_least, lanes_equal

LOWEST = np.float32(-3.4028235e38)
"""The lowest finite number. Forbidden tokens are below it: their logits are minus infinity."""
_BLOCK_VECTORS = 64
_SET_VECTORS = 16
"""Each lane of so many vectors is a set of tokens, whose best one bounds what the best tokens can be."""


@cpu_function
def is_nan_free(x, size):
    """Return whether no logit is NaN."""
    count = np.int64(0)
    for i in range(size):
        count += np.int64(x[i] != x[i])
    return count == 0


@cpu_function
def is_sound(x, size, odd, top):
    """Return whether no logit is NaN, and the largest is finite.

    ``odd`` is the sum of 0 times each logit: 0, or NaN if some logit is NaN or infinite.
    """
    return (odd == 0 or is_nan_free(x, size)) and LOWEST <= top < np.inf


@cpu_function
def best_token(x, size):
    """Return the best token and whether the row is sound."""
    width = lanes()
    block = _BLOCK_VECTORS * width
    whole = size - size % width
    top, place = np.float32(-np.inf), 0
    zero, odd_0, odd_1, odd_2, odd_3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    for first in range(0, whole, block):
        end = min(first + block, whole)
        a, b, c, d = splat(-np.inf), splat(-np.inf), splat(-np.inf), splat(-np.inf)
        i = first
        while i + 4 * width <= end:
            v_0, v_1 = load(x, i), load(x, i + width)
            v_2, v_3 = load(x, i + 2 * width), load(x, i + 3 * width)
            a, b, c, d = maximum(v_0, a), maximum(v_1, b), maximum(v_2, c), maximum(v_3, d)
            odd_0, odd_1 = multiply_add(v_0, zero, odd_0), multiply_add(v_1, zero, odd_1)
            odd_2, odd_3 = multiply_add(v_2, zero, odd_2), multiply_add(v_3, zero, odd_3)
            i += 4 * width
        while i < end:
            v_0 = load(x, i)
            a, odd_0 = maximum(v_0, a), multiply_add(v_0, zero, odd_0)
            i += width
        largest = largest_of(maximum(maximum(a, b), maximum(c, d)))
        if largest > top:
            top, place = largest, first
    odd = (sum_of(odd_0) + sum_of(odd_1)) + (sum_of(odd_2) + sum_of(odd_3))
    for i in range(whole, size):
        odd += x[i] * np.float32(0)
        if x[i] > top:
            top, place = x[i], i
    return _first_equal(x, place, whole, top), is_sound(x, size, odd, top)


@cpu_function
def _first_equal(x, place, whole, value):
    """Return the first token from ``place`` on with this logit; ``place`` if it is not below ``whole``."""
    width = lanes()
    for i in range(place, whole, width):
        mask = lanes_equal(load(x, i), value)
        if mask != 0:
            return i + first_lane(mask)
    return place


@cpu_function
def best_of_sets(x, size, maxima):
    """Return the largest logit and whether the row is sound; write the largest logit of each set of tokens.

    ``maxima`` has :func:`num_maxima` elements. Tokens behind the last whole vector are in no set.
    """
    width = lanes()
    whole = size - size % width
    top, zero, odd_0, odd_1, count = splat(-np.inf), splat(0.0), splat(0.0), splat(0.0), 0
    for first in range(0, whole, _SET_VECTORS * width):
        a, b, i, end = splat(-np.inf), splat(-np.inf), first, min(first + _SET_VECTORS * width, whole)
        while i + 2 * width <= end:
            v_0, v_1 = load(x, i), load(x, i + width)
            a, b = maximum(v_0, a), maximum(v_1, b)
            odd_0, odd_1 = multiply_add(v_0, zero, odd_0), multiply_add(v_1, zero, odd_1)
            i += 2 * width
        if i < end:
            v_0 = load(x, i)
            a, odd_0 = maximum(v_0, a), multiply_add(v_0, zero, odd_0)
        a = maximum(a, b)
        store(maxima, count, a)
        top, count = maximum(a, top), count + width
    odd, largest = sum_of(odd_0) + sum_of(odd_1), largest_of(top)
    for i in range(whole, size):
        odd += x[i] * np.float32(0)
        largest = max(largest, x[i])
    return largest, is_sound(x, size, odd, largest)


@cpu_function
def num_maxima(size):
    """Return how many maxima :func:`best_of_sets` writes."""
    step = _SET_VECTORS * lanes()
    return (size - size % lanes() + step - 1) // step * lanes()


@cpu_function
def best_tokens(x, size, k, least, maxima, ids, values):
    """Write the ``k`` best tokens whose logits are at least ``least``, ordered by id; return their number.

    ``maxima`` are those of :func:`best_of_sets`. ``ids`` and ``values`` have room for ``size`` tokens and a
    vector more. Minus infinity is no token's logit here.

    If k sets have a logit of at least b, then so have at least k tokens. So only tokens of at least b are
    looked at again, and there are few of them.
    """
    width = lanes()
    bound = max(least, LOWEST)
    if maxima.shape[0] >= k:
        bound = max(bound, _threshold(maxima, maxima.shape[0], k, k // 4 + 4))
    whole, count = size - size % width, 0
    for i in range(0, whole, width):
        mask = lanes_at_least(load(x, i), bound)
        while mask != 0:
            token = i + first_lane(mask)
            ids[count], values[count] = token, x[token]
            count += 1
            mask &= mask - 1
    for token in range(whole, size):
        if x[token] >= bound:
            ids[count], values[count] = token, x[token]
            count += 1
    if count <= k:
        return count
    padded = (count + width - 1) // width * width
    values[count:padded] = -np.inf
    return _keep_best(ids, values, count, k, _threshold(values, padded, k, 0))


@cpu_function
def _keep_best(ids, values, count, k, least):
    """Keep the tokens above ``least`` and, of those equal to it, the first, so that ``k`` remain."""
    num_ties = k
    for i in range(count):
        num_ties -= values[i] > least
    kept = 0
    for i in range(count):
        is_tie = values[i] == least
        if values[i] > least or (is_tie and num_ties > 0):
            ids[kept], values[kept] = ids[i], values[i]
            kept += 1
            num_ties -= is_tie
    return kept


@cpu_function
def _threshold(values, size, k, slack):
    """Return the largest number that at least ``k`` values reach, or one that at most ``k + slack`` reach.

    ``size`` is a multiple of the lanes. The number is found bit by bit: the bits of floats, read as integers,
    have the order of the floats, once those of negative floats are flipped. If fewer values than k are
    finite, it is the lowest finite number.
    """
    low, high = np.int64(_flip(np.int32(-8388609))), np.int64(0x7F800000)  # the lowest number; infinity
    if _count(values, size, LOWEST) <= k:
        return LOWEST
    while high - low > 1:
        middle = (low + high) >> 1
        count = _count(values, size, np.int32(_flip(np.int32(middle))).view(np.float32))
        if count < k:
            high = middle
        else:
            low = middle
            if count <= k + slack:
                break
    return np.int32(_flip(np.int32(low))).view(np.float32)


@cpu_function
def _flip(bits):
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@cpu_function
def _count(values, size, number):
    count = np.int64(0)
    for i in range(0, size, lanes()):
        count += count_at_least(load(values, i), number)
    return count
