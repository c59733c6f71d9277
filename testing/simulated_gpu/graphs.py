"""Captured graphs of the simulated GPU. All graphs share one memory pool.

A graph's results lie in that pool. The replay of another graph overwrites them, here with NaN; only memory
from before the capture keeps its content.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from testing.simulated_gpu.device_tensor import DeviceTensor
from testing.simulated_gpu.streams import Operation


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``: the operations of one capture."""

    def __init__(self, launch: Callable[[Graph], None]) -> None:
        self._launch = launch
        self.operations: list[Operation] = []
        self._memory: list[Tensor] = []
        self._live_bytes = self.peak_bytes = 0

    def pool(self) -> int:
        return 0

    def replay(self) -> None:
        self._launch(self)

    @property
    def retained_bytes(self) -> int:
        """Bytes of the capture's tensors that are still referred to, which no other graph may use."""
        return self._live_bytes

    def made(self, tensor: DeviceTensor) -> None:
        """Note memory that was allocated during the capture."""
        self._memory.append(tensor.plain)
        num_bytes = tensor.plain.numel() * tensor.plain.element_size()
        self._live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(tensor, self._freed, num_bytes)

    def _freed(self, num_bytes: int) -> None:
        self._live_bytes -= num_bytes

    def run(self) -> None:
        for operation in self.operations:
            operation()

    def spoil(self) -> None:
        """Do to this graph's memory what the replay of another graph does."""
        for tensor in self._memory:
            poison(tensor)


def poison(tensor: Tensor) -> None:
    """Fill memory with what nobody has written: NaN, or an index that belongs to somebody else."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(1)
