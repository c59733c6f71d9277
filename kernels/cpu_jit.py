"""Numba for the CPU paths: imported and compiled at the first call, never at import.

A kernel is a plain function over numpy arrays and numbers:

    @cpu_jit(parallel=True)
    def _scale(x, factor):
        for i in prange(x.shape[0]):
            x[i] *= factor

    _scale(as_array(tensor), 2.0)               # torch's number of threads
    _scale(as_array(tensor), 2.0, threads=1)    # too little work to share

* The machine code is cached on disk (numba's ``cache=True``: beside the module, or in the user's cache
  folder where that is read-only), so only the first process on a machine compiles.
* A kernel may call another ``cpu_jit`` function of its module; that one must not be called with
  ``threads``.
* Reductions may be reordered and contracted into FMA, but NaN and infinity keep their meaning: the state
  sanitizer finds stale reads by the NaN that they bring along.
* The GIL is released while a kernel runs.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

# No "nnan", "ninf": with them the compiler may drop the very NaN that gives a stale slot away.
_FASTMATH = {"reassoc", "contract", "arcp", "nsz", "afn"}

# Stands for numba.prange in a kernel's source, so that a module with kernels imports without numba.
prange = range


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The numpy view of a CPU tensor; strides are kept, nothing is copied."""
    return tensor.detach().numpy()


class CpuKernel:
    """A function that numba compiles when it is first called; see :func:`cpu_jit`."""

    def __init__(self, fn: Callable[..., Any], parallel: bool) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.parallel = parallel

    @functools.cached_property
    def dispatcher(self) -> Any:
        """Numba's dispatcher of this function; creating it compiles nothing yet."""
        numba = _numba()
        # The same code with prange and sibling kernels resolved to what numba knows.
        names = {
            name: value.dispatcher if isinstance(value, CpuKernel) and value is not self else value
            for name, value in self.fn.__globals__.items()
            if name in self.fn.__code__.co_names
        }
        names |= {"__name__": self.fn.__module__, "prange": numba.prange}
        fn = types.FunctionType(self.fn.__code__, names, self.fn.__name__, self.fn.__defaults__)
        fn.__qualname__ = self.fn.__qualname__
        fn.__module__ = self.fn.__module__
        return numba.njit(parallel=self.parallel, fastmath=_FASTMATH, nogil=True, cache=True)(fn)

    def __call__(self, *args: Any, threads: int | None = None) -> Any:
        """Run on ``threads`` threads, by default as many as torch uses."""
        if self.parallel:
            wanted = torch.get_num_threads() if threads is None else threads
            numba = _numba()
            numba.set_num_threads(min(wanted, numba.config.NUMBA_NUM_THREADS))
        return self.dispatcher(*args)


@functools.cache
def _numba() -> Any:
    import numba

    # torch has loaded GNU OpenMP already: numba's "omp" layer shares that pool. Any other layer brings a
    # second pool, whose threads fight torch's spinning ones for the cores.
    if numba.config.THREADING_LAYER == "default":
        numba.config.THREADING_LAYER = "omp"
    return numba


def cpu_jit(*, parallel: bool = False) -> Callable[[Callable[..., Any]], CpuKernel]:
    """Compile the decorated function with numba at its first call; ``parallel`` enables ``prange``."""
    return lambda fn: CpuKernel(fn, parallel)
