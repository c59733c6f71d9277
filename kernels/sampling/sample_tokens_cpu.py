"""The CPU path of :func:`kernels.sampling.sample_tokens.sample_tokens`: one call for all rows.

A row does only what its own parameters ask for:

| row | reads its logits |
|---|---|
| greedy | once |
| temperature | once, for the race and the largest logit |
| min-p | the same; once again if the winner of all tokens is below the threshold |
| top-p | twice: the weights of all tokens, and of those that are better than the winner |
| top-k | twice, then a list of k tokens |

With top-p, the winner of all tokens remains with a chance of top-p. If it doesn't, the next race is among
the tokens that are better. This halves their number or does better, on average.
"""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu.compiler import cpu_function
from kernels.cpu.exp import exp_f32
from kernels.cpu.jit import cpu_jit
from kernels.cpu.vector import lanes, largest_of, load, maximum, multiply_add, splat, sum_of
from kernels.sampling.best_tokens_cpu import (
    LOWEST,
    best_of_sets,
    best_token,
    best_tokens,
    is_sound,
    num_maxima,
)
from kernels.sampling.noise import coarse_noise, noise_key, token_noise
from kernels.sampling.race_vectors import array_at, first_lane, lanes_at_least, noise_bound, where_at_least

_LOG2_E = 1.4426950408889634
_UNITS = np.float32(2.0**40)
_RACE_VECTORS = 8


@cpu_jit
def sample_rows(
    logits,
    rows,
    positions,
    tokens,
    is_finite,
    num_positions,
    vocab_size,
    numbers,
    integers,
    shift,
    begin,
    end,
):
    """Sample items ``begin`` to ``end``. ``logits``, ``rows`` and ``positions`` are addresses."""
    logits = array_at(logits, end * vocab_size, numbers)
    rows = array_at(rows, (end + num_positions - 1) // num_positions, integers)
    positions = array_at(positions, end, integers)
    for item in range(begin, end):
        row = rows[item // num_positions]
        x = logits[item * vocab_size : (item + 1) * vocab_size]
        temperature = numbers[row, 0]
        if temperature <= 0:
            token, sound = best_token(x, vocab_size)
        else:
            key = noise_key(integers[row, 1], positions[item] + shift)
            top_p, min_p, top_k = numbers[row, 1], numbers[row, 2], integers[row, 0]
            if 0 < top_k < vocab_size:
                token, sound = _draw_of_best(x, vocab_size, key, temperature, top_k, top_p, min_p)
            else:
                token, sound = _draw(x, vocab_size, key, temperature, top_p, min_p)
        tokens[item], is_finite[item] = token, sound


@cpu_function
def _draw(x, size, key, temperature, top_p, min_p):
    """Draw from all tokens that min-p and top-p leave. Return the token and whether the row is sound."""
    winner, top, odd = _race(x, size, key, temperature, np.float32(-np.inf), size)
    sound = is_sound(x, size, odd, top)
    if not sound or (top_p >= 1 and min_p <= 0):
        return winner, sound
    least = _least(top, temperature, min_p)
    if x[winner] < least:
        winner = _race(x, size, key, temperature, least, size)[0]
    if top_p < 1:
        total, above = _weigh(x, size, top, temperature, least, winner)
        goal = _goal(top_p, total)
        while above >= goal:
            winner = _race(x, size, key, temperature, x[winner], winner)[0]
            above = _weigh(x, size, top, temperature, least, winner)[1]
    return winner, sound


@cpu_function
def _draw_of_best(x, size, key, temperature, top_k, top_p, min_p):
    """Draw from the ``top_k`` best tokens, or from what min-p and top-p leave of them."""
    maxima = np.empty(num_maxima(size), np.float32)
    top, sound = best_of_sets(x, size, maxima)
    if not sound:
        return 0, sound
    ids, values = np.empty(size, np.int32), np.empty(size + lanes(), np.float32)
    least = _least(top, temperature, min_p)
    count = best_tokens(x, size, top_k, least, maxima, ids, values)
    winner = _race_of_few(ids, values, count, key, temperature, np.float32(-np.inf), count)
    if top_p < 1:
        total, above = _weigh(values, count, top, temperature, least, winner)
        goal = _goal(top_p, total)
        while above >= goal:
            winner = _race_of_few(ids, values, count, key, temperature, values[winner], winner)
            above = _weigh(values, count, top, temperature, least, winner)[1]
    return np.int64(ids[winner]), sound


@cpu_function
def _least(top, temperature, min_p):
    """Return the smallest logit that min-p keeps."""
    if min_p <= 0:
        return np.float32(-np.inf)
    return np.float32(top + np.float64(temperature) * math.log(np.float64(min_p)))


@cpu_function
def _goal(top_p, total):
    return max(np.int64(math.ceil(np.float64(top_p) * total)), 1)


@cpu_function
def _weigh(x, size, top, temperature, least, place):
    """Return the units of all tokens from the logit ``least`` on, and of those better than ``place``."""
    slope, value = np.float32(np.float32(1) / temperature), x[place]
    total, above = np.int64(0), np.int64(0)
    for i in range(size):
        units = np.int64(exp_f32((x[i] - top) * slope) * _UNITS)
        units = units if x[i] >= least else np.int64(0)
        total += units
        above += units if x[i] > value or (x[i] == value and i < place) else np.int64(0)
    return total, above


@cpu_function
def _race(x, size, key, temperature, floor, floor_place):
    """Race the tokens above ``floor``, and those equal to it before ``floor_place``.

    Returns the winner, the largest logit, and 0 or NaN (:func:`is_sound`).
    """
    width, inverse = lanes(), 1 / np.float64(temperature)
    whole = size - size % width
    slope, zero, top = splat(inverse * _LOG2_E), splat(0.0), splat(-np.inf)
    odd_0, odd_1 = splat(0.0), splat(0.0)
    best, winner, bound = -np.inf, 0, LOWEST
    for first in range(0, whole, _RACE_VECTORS * width):
        end, score = min(first + _RACE_VECTORS * width, whole), splat(-np.inf)
        for i in range(first, end, width):
            v = load(x, i)
            top, odd_0, odd_1 = maximum(v, top), odd_1, multiply_add(v, zero, odd_0)
            may = multiply_add(v, slope, noise_bound(key, i))
            score = maximum(where_at_least(v, floor, may, -np.inf), score)
        if lanes_at_least(score, bound) == 0:
            continue
        for i in range(first, end, width):
            v = load(x, i)
            may = where_at_least(v, floor, multiply_add(v, slope, noise_bound(key, i)), -np.inf)
            mask = lanes_at_least(may, bound)
            while mask != 0:
                token = i + first_lane(mask)
                mask &= mask - 1
                if x[token] > floor or token < floor_place:
                    time = _score(x[token], inverse, key, token)
                    if time > best:
                        best, winner, bound = time, token, _bound(time)
                        mask &= lanes_at_least(may, bound)
    odd, largest = sum_of(odd_0) + sum_of(odd_1), largest_of(top)
    for token in range(whole, size):
        odd += x[token] * np.float32(0)
        largest = max(largest, x[token])
        if x[token] > floor or (x[token] == floor and token < floor_place):
            time = _score(x[token], inverse, key, token)
            if time > best:
                best, winner = time, token
    return winner, largest, odd


@cpu_function
def _race_of_few(ids, values, count, key, temperature, floor, floor_place):
    """Race tokens of a list above ``floor``, and those equal to it before ``floor_place``. Return a place."""
    inverse = 1 / np.float64(temperature)
    slope = np.float32(inverse * _LOG2_E)
    best, winner, bound = -np.inf, 0, LOWEST
    for i in range(count):
        value = values[i]
        if value < floor or (value == floor and i >= floor_place):
            continue
        bits = np.float32(coarse_noise(key, ids[i])).view(np.int32)
        if value * slope + (np.float32(159) - np.float32(bits) * np.float32(2.0**-23)) >= bound:
            time = _score(value, inverse, key, ids[i])
            if time > best:
                best, winner, bound = time, i, _bound(time)
    return winner


@cpu_function
def _score(value, inverse, key, token):
    return np.float64(value) * inverse - math.log(-math.log(1.0 - token_noise(key, token)))


@cpu_function
def _bound(score):
    """Return what a token's float32 bound on its score, to base 2, must reach if it is to beat ``score``."""
    score *= _LOG2_E
    return np.float32(score - 0.01 - 2.0**-21 * (abs(score) + 64))
