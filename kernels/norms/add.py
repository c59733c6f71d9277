"""The sum of two tensors: ``out = x + y``.

On CPU, numba handles float32, so that a recorded step (:mod:`kernels.cpu.graph`) includes the addition;
torch handles all other cases.
"""

from __future__ import annotations

import torch

from kernels.cpu.jit import FlatArray, cpu_jit
from kernels.cpu.vector import add as add_lanes
from kernels.cpu.vector import lanes, load, store

_GRAIN_ELEMENTS = 2**19  # a thread's minimum share: about 100 µs


@cpu_jit
def _add(x, y, width, out, begin, end):
    w = lanes()
    first, last = begin * width, end * width
    whole = last - (last - first) % w
    for j in range(first, whole, w):
        store(out, j, add_lanes(load(x, j), load(y, j)))
    for j in range(whole, last):
        out[j] = x[j] + y[j]


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Add x and y ``[n, width]`` of one dtype; the sum has the same shape and dtype."""
    if x.is_cuda or not x.dtype == y.dtype == torch.float32:
        return x + y
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    num_rows, width = x.shape
    grain = 1 + _GRAIN_ELEMENTS // width
    _add.parallel_for(num_rows, grain, FlatArray(x), FlatArray(y), width, FlatArray(out))
    return out
