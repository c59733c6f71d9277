"""The sums of moe_combine.py on CPU in float32: each product is added by one FMA, in the order of j."""

from __future__ import annotations

import torch

from kernels.cpu.jit import FlatArray, cpu_jit
from kernels.cpu.vector import (
    broadcast,
    lanes,
    load,
    multiply,
    multiply_add,
    multiply_add_number,
    store,
)

_GRAIN_PRODUCTS = 2**19  # about 100 µs


@cpu_jit
def _combine(results, places, weights, size, k, out, begin, end):
    """Items are tokens."""
    whole = size - size % lanes()
    for token in range(begin, end):
        first, target = token * k, token * size
        for c in range(0, whole, lanes()):
            total = multiply(broadcast(weights, first), load(results, places[first] * size + c))
            for j in range(1, k):
                row = places[first + j] * size
                total = multiply_add(broadcast(weights, first + j), load(results, row + c), total)
            store(out, target + c, total)
        for c in range(whole, size):
            one = weights[first] * results[places[first] * size + c]
            for j in range(1, k):
                one = multiply_add_number(weights[first + j], results[places[first + j] * size + c], one)
            out[target + c] = one


def moe_combine_cpu(results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute :func:`kernels.moe.moe_combine.moe_combine` for float32 results."""
    (num_tokens, k), size = places.shape, results.shape[1]
    out = torch.empty(num_tokens, size)
    _combine.parallel_for(
        num_tokens,
        1 + _GRAIN_PRODUCTS // (1 + k * size),
        FlatArray(results.contiguous()),
        FlatArray(places.contiguous()),
        FlatArray(weights.contiguous()),
        size,
        k,
        FlatArray(out),
    )
    return out
