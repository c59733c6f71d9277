"""CPU kernels: plain functions over numpy arrays and numbers, compiled at their first call.

A kernel whose last two arguments are ``begin`` and ``end`` works on that range of its items, and threads can
share it:

    @cpu_jit
    def _scale(x, factor, begin, end):
        for i in range(begin, end):
            x[i] *= factor

    _scale(as_array(tensor), 2.0, 0, 100)                      # on this thread
    _scale.parallel_for(100, 16, as_array(tensor), 2.0)        # threads may share it; 16 items take 100 µs

:mod:`kernels.cpu.compiler` says what is true of every compiled function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kernels.cpu.compiler import CpuFunction
from kernels.cpu.threads import cpu_threads, kernel_threads, run_shared

__all__ = ["CpuKernel", "as_array", "as_flat_array", "cpu_jit", "recording"]

_STAND_INS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
"""Types that numpy lacks, and the integers that kernels get instead (:mod:`kernels.cpu.vector`)."""


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return the numpy view of a CPU tensor. Strides are kept, nothing is copied."""
    return tensor.detach().numpy()


def as_flat_array(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory from a strided CPU tensor's first element to its last, as one contiguous array.

    Numba vectorizes a loop only if it knows that the stride is one. A kernel gets a pool's view as this
    array and ``tensor.stride()``, and slices the innermost axis out of it. bfloat16 is returned as uint16,
    float8_e4m3fn as uint8.
    """
    if tensor.dtype in _STAND_INS:
        tensor = tensor.view(_STAND_INS[tensor.dtype])
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.numpy().reshape(-1)
    span = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        span += (size - 1) * stride
    return tensor.as_strided((span if tensor.numel() else 0,), (1,)).numpy()


class CpuKernel(CpuFunction):
    """A compiled function whose items threads can share; ``cpu_jit`` decorates it."""

    def parallel_for(self, num_items: int, grain: int, *args: Any) -> None:
        """Run over items ``[0, num_items)``, shared with other threads if there is enough work.

        ``grain`` items take about 100 µs, five times the time of waking a thread. That much is shared if the
        helpers are awake, twice as much otherwise. While a :class:`kernels.cpu.graph.CpuGraph` records on
        this thread, the call is also recorded.
        """
        if num_items == 0:
            return
        if recording.note is not None:
            recording.note(self.dispatcher, num_items, grain, args)
        if kernel_threads() == 1 or num_items < (max(2, grain) if cpu_threads().are_awake else 2 * grain):
            self.dispatcher(*args, 0, num_items)
        else:
            run_shared(self.dispatcher, num_items, grain, args)


class _Recording(threading.local):
    """The recorder of this thread's kernel calls; None if no graph records."""

    note: Callable[[Any, int, int, tuple[Any, ...]], None] | None = None


recording = _Recording()


if TYPE_CHECKING:  # numba infers the types of kernels at each call
    from typing import no_type_check as cpu_jit
else:
    cpu_jit = CpuKernel
