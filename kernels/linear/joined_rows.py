"""Two tensors' rows in one tensor: a layer's outputs for decode rows and for prompts.

On CPU, numba handles float32: a prompt's step then need not wait until the calls before have run, as it must
before torch reads their results (:func:`kernels.cpu.jit.settle`). torch handles all other cases.
"""

from __future__ import annotations

import torch

from kernels.cpu.jit import FlatArray, cpu_jit, settle

_GRAIN_ELEMENTS = 2**18  # a thread's minimum share: about 100 µs


@cpu_jit
def _join_rows(first, second, width, out, begin, end):
    split = first.size
    for i in range(begin * width, min(end * width, split)):
        out[i] = first[i]
    for i in range(max(begin * width, split), end * width):
        out[i] = second[i - split]


def joined_rows(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return ``[n + m, ...]``: the rows of ``first`` ``[n, ...]``, and behind them those of ``second``
    ``[m, ...]``. Both have one dtype."""
    is_plain = first.is_contiguous() and second.is_contiguous()
    if first.is_cuda or not is_plain or not first.dtype == second.dtype == torch.float32:
        settle()
        return torch.cat((first, second))
    out = torch.empty(len(first) + len(second), *first.shape[1:])
    width = first.shape[1:].numel()
    grain = 1 + _GRAIN_ELEMENTS // width
    _join_rows.parallel_for(len(out), grain, FlatArray(first), FlatArray(second), width, FlatArray(out))
    return out
