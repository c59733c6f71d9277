"""Look up rows of a table by index: ``out[i] = scale * table[ids[i]]``.

On CPU, numba handles float32, so that a recorded step (:mod:`kernels.cpu.graph`) includes the look-up; torch
handles all other cases.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from kernels.cpu.jit import cpu_jit

_GRAIN_ELEMENTS = 2**18  # a thread's minimum share: about 100 µs


@cpu_jit
def _gather(ids, table, scale, out, begin, end):
    for i in range(begin, end):
        row, source = out[i], table[ids[i]]
        for j in range(row.shape[0]):
            row[j] = source[j] * scale


def embedding(ids: torch.Tensor, table: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """Return ``[n, size]``: row ``ids[i]`` of ``table`` ``[rows, size]`` for every i. ids is ``[n]`` int64.

    The table must have a row for every id.
    """
    if ids.is_cuda or table.dtype != torch.float32:
        rows = F.embedding(ids, table)
        return rows if scale == 1.0 else rows * scale
    out = torch.empty(len(ids), table.shape[1])
    grain = 1 + _GRAIN_ELEMENTS // table.shape[1]
    _gather.parallel_for(len(ids), grain, ids, table, np.float32(scale), out)
    return out
