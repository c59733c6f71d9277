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


class HeldMemory:
    """Bytes of tensors that somebody refers to."""

    def __init__(self) -> None:
        self.num_bytes = self.peak_bytes = 0

    def add(self, tensor: DeviceTensor) -> None:
        """Count a new tensor until nobody refers to it any more."""
        num_bytes = tensor.plain.numel() * tensor.plain.element_size()
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        weakref.finalize(tensor, self._freed, num_bytes)

    def _freed(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``: the operations of one capture."""

    def __init__(self, launch: Callable[[Graph], None]) -> None:
        self._launch = launch
        self.operations: list[Operation] = []
        self.launched: list[tuple[str, list[Tensor]]] = []
        """What the capture launched, operators and Triton kernels: name, operands and results."""
        self._memory: list[Tensor] = []
        self.held = HeldMemory()
        """Memory that was allocated during the capture."""

    def pool(self) -> int:
        return 0

    def replay(self) -> None:
        self._launch(self)

    def made(self, tensor: DeviceTensor) -> None:
        """Note memory that was allocated during the capture. What is still held afterwards, no other graph
        may use."""
        self._memory.append(tensor.plain)
        self.held.add(tensor)

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
