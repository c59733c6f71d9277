"""Results of steps that a CPU runs one after the other, before the host reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.jit import cpu_jit


class KeptResults:
    """Copies of ``results`` ``[R, T + 3]`` int64, which every step overwrites, for up to ``most_steps``."""

    def __init__(self, results: Tensor, most_steps: int) -> None:
        self._results = results
        self._kept = torch.empty((most_steps, *results.shape), dtype=results.dtype)
        self._count = torch.zeros(1, dtype=torch.int64)
        self._num_steps = self._count.numpy()

    def keep(self) -> None:
        """Copy the results of the step that ends. This is a part of the step."""
        _keep_results_cpu.parallel_for(1, 1, self._results, self._kept, self._count)

    def begin(self) -> None:
        """Forget all results, before up to ``most_steps`` steps run."""
        self._num_steps[0] = 0

    def kept(self) -> Tensor:
        """Return the results ``[steps, R, T + 3]`` since :meth:`begin`. Later steps overwrite them."""
        return self._kept[: int(self._num_steps[0])]


@cpu_jit
def _keep_results_cpu(results, kept, count, begin, end):
    place = count[0]
    for r in range(results.shape[0]):
        for i in range(results.shape[1]):
            kept[place, r, i] = results[r, i]
    count[0] = place + 1
