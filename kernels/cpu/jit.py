"""CPU kernels: plain functions over numpy arrays and numbers, compiled at their first call.

A kernel whose last two arguments are ``begin`` and ``end`` works on that range of its items, and threads can
share it:

    @cpu_jit
    def _scale(x, factor, begin, end):
        for i in range(begin, end):
            x[i] *= factor

    _scale(as_array(tensor), 2.0, 0, 100)            # on this thread
    _scale.parallel_for(100, 16, tensor, 2.0)        # threads may share it; 16 items take 100 µs

:meth:`CpuKernel.parallel_for` takes tensors as well as arrays: to make an array of a tensor takes 5 µs.
:mod:`kernels.cpu.compiler` says what is true of every compiled function.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kernels.cpu.compiler import CpuFunction
from kernels.cpu.native_call import FlatArray, NativeCall, as_array, as_arrays
from kernels.cpu.threads import cpu_threads, kernel_threads, table_row

__all__ = ["CpuKernel", "FlatArray", "as_array", "cpu_jit", "noted", "settle"]


class CpuKernel(CpuFunction):
    """A compiled function whose items threads can share; ``cpu_jit`` decorates it."""

    def parallel_for(self, num_items: int, grain: int, *args: Any) -> None:
        """Run over items ``[0, num_items)``, shared with other threads if there is enough work.

        ``grain`` items take about 100 µs. ``args`` are numbers, arrays, tensors, :class:`FlatArray` and
        tuples of these. A thread may note its calls to make them later (:mod:`kernels.cpu.call_list`).
        """
        if num_items == 0:
            return
        if noted.calls is not None:
            noted.calls.note(self.dispatcher, num_items, grain, args)
            return
        threads = cpu_threads()
        # To wake a thread takes 20 µs.
        if kernel_threads() == 1 or num_items < (max(2, grain) if threads.are_awake else 2 * grain):
            self.dispatcher(*as_arrays(args), 0, num_items)
        else:
            call = NativeCall.bind(self.dispatcher, args)
            threads.run(np.array([table_row(call, num_items, grain)], dtype=np.int64))

    def __call__(self, *args: Any) -> None:
        settle()
        super().__call__(*args)


class NotedCalls(Protocol):
    """Calls that a thread makes later."""

    def note(self, dispatcher: Any, num_items: int, grain: int, args: tuple[Any, ...]) -> None:
        """Add a call of :meth:`CpuKernel.parallel_for`."""

    def settle(self) -> None:
        """Make all calls now. Raises :class:`RuntimeError` if replays will make them without what follows."""


class _Noted(threading.local):
    """What notes this thread's kernel calls; None if they are made at once."""

    calls: NotedCalls | None = None


noted = _Noted()


def settle() -> None:
    """Make this thread's noted calls, so that what follows finds their results.

    Model code says so before torch computes with what a kernel wrote, or overwrites what one reads.
    """
    if noted.calls is not None:
        noted.calls.settle()


if TYPE_CHECKING:  # numba infers the types of kernels at each call
    from typing import no_type_check as cpu_jit
else:
    cpu_jit = CpuKernel
