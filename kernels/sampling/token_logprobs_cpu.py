"""The CPU path of :func:`kernels.sampling.token_logprobs.token_logprobs`."""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu.compiler import cpu_function
from kernels.cpu.exp import exp_f32
from kernels.cpu.jit import cpu_jit
from kernels.cpu.vector import lanes
from kernels.sampling.best_tokens_cpu import LOWEST, best_of_sets, best_tokens, num_maxima


@cpu_jit
def logprobs_of_rows(logits, token_ids, numbers, integers, vocab_size, begin, end):
    num_top = numbers.shape[1] - 1
    maxima = np.empty(num_maxima(vocab_size), np.float32)
    ids, values = np.empty(vocab_size, np.int32), np.empty(vocab_size + lanes(), np.float32)
    for row in range(begin, end):
        x = logits[row * vocab_size : (row + 1) * vocab_size]
        top = best_of_sets(x, vocab_size, maxima)[0]
        chosen = x[token_ids[row]]
        total, num_better = _sum_and_rank(x, vocab_size, top, chosen)
        log_sum = np.float64(top) + math.log(total)
        numbers[row, 0] = np.float64(chosen) - log_sum
        integers[row, 0], integers[row, 1] = token_ids[row], num_better + 1
        count = 0
        if num_top > 0:
            count = best_tokens(x, vocab_size, num_top, LOWEST, maxima, ids, values)
            _sort(ids, values, count)
        for i in range(num_top):
            integers[row, 2 + i] = ids[i] if i < count else 0
            numbers[row, 1 + i] = np.float64(values[i]) - log_sum if i < count else -np.inf


@cpu_function
def _sum_and_rank(x, size, top, chosen):
    total, num_better = np.float64(0), np.int64(0)
    for i in range(size):
        total += np.float64(exp_f32(x[i] - top))
        num_better += np.int64(x[i] > chosen)
    return total, num_better


@cpu_function
def _sort(ids, values, count):
    """Order a short list by value, largest first; equal values keep their order."""
    for i in range(1, count):
        token, value, place = ids[i], values[i], i
        while place > 0 and values[place - 1] < value:
            ids[place], values[place] = ids[place - 1], values[place - 1]
            place -= 1
        ids[place], values[place] = token, value
