"""Numba for the CPU paths: imported and compiled at the first call, never at import.

A kernel is a plain function over numpy arrays and numbers. One whose last two arguments are ``begin`` and
``end`` works on that range of its items, and can be shared among threads:

    @cpu_jit
    def _scale(x, factor, begin, end):
        for i in range(begin, end):
            x[i] *= factor

    _scale(as_array(tensor), 2.0, 0, 100)                      # on this thread
    _scale.parallel_for(100, 16, as_array(tensor), 2.0)        # threads may share it; 16 items take 100 µs

* The machine code is cached on disk: in NUMBA_CACHE_DIR if set, else beside the module, else (read-only
  installations) in the user's cache folder. Only the first process on a machine compiles.
* A kernel may call another kernel of its module; numba inlines it where that helps.
* Sums may be reordered and contracted into FMA, but NaN and infinity keep their meaning: the state
  sanitizer finds stale reads by the NaN that they bring along.
* The GIL is released while a kernel runs.
"""

from __future__ import annotations

import functools
import logging
import threading
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

# No "nnan", "ninf": with them the compiler may drop the very NaN that gives a stale slot away.
_FASTMATH = {"reassoc", "contract", "arcp", "nsz", "afn"}


_STAND_INS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
"""What numpy does not have, and the integers as which kernels get it (:mod:`kernels.cpu_vector`)."""


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The numpy view of a CPU tensor; strides are kept, nothing is copied."""
    return tensor.detach().numpy()


def as_flat_array(tensor: torch.Tensor) -> np.ndarray:
    """The memory from a strided CPU tensor's first element to its last, as one contiguous array.

    Numba vectorizes a loop only where it knows the stride to be one. A kernel gets a pool's view as this
    array and ``tensor.stride()``, and slices the innermost axis out of it. bfloat16 comes as uint16,
    float8_e4m3fn as uint8.
    """
    if tensor.dtype in _STAND_INS:
        tensor = tensor.view(_STAND_INS[tensor.dtype])
    if tensor.numel() == 0:
        return tensor.detach().reshape(-1).numpy()
    span = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        span += (size - 1) * stride
    return tensor.detach().as_strided((span,), (1,)).numpy()


class CpuIntrinsic:
    """Instructions that numba's Python can't say, for kernels to call; see :func:`cpu_intrinsic`."""

    def __init__(self, make: Callable[[], Any]) -> None:
        functools.update_wrapper(self, make)
        self.make = make

    @functools.cached_property
    def dispatcher(self) -> Any:
        """What numba compiles in place of a call."""
        return self.make()

    @functools.cached_property
    def _digest(self) -> int:
        return zlib.crc32(Path(self.make.__code__.co_filename).read_bytes())


class CpuKernel:
    """A function that numba compiles when it is first called; see :func:`cpu_jit`."""

    def __init__(self, fn: Callable[..., None]) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn

    @functools.cached_property
    def dispatcher(self) -> Any:
        """Numba's dispatcher of this function; creating it compiles nothing yet."""
        import numba

        # The same code, the kernels that it calls resolved to what numba knows.
        names = {name: value.dispatcher for name, value in self._callees.items()}
        fn = types.FunctionType(self.fn.__code__, self.fn.__globals__ | names)
        functools.update_wrapper(fn, self.fn)
        # Numba recompiles when this kernel's file changes; the digest sees to the callees' files.
        fn.__qualname__ += f"_{self._digest:08x}"
        try:
            return numba.njit(fastmath=_FASTMATH, nogil=True, cache=True)(fn)
        except RuntimeError:  # numba found no folder to cache in
            _warn_that_nothing_is_cached()
            return numba.njit(fastmath=_FASTMATH, nogil=True)(fn)

    @functools.cached_property
    def _callees(self) -> dict[str, CpuKernel | CpuIntrinsic]:
        named = {name: self.fn.__globals__.get(name) for name in self.fn.__code__.co_names}
        return {name: value for name, value in named.items() if isinstance(value, (CpuKernel, CpuIntrinsic))}

    @functools.cached_property
    def _digest(self) -> int:
        """Checksum of the source files that this kernel's machine code is made from."""
        digest = zlib.crc32(Path(self.fn.__code__.co_filename).read_bytes())
        for callee in self._callees.values():
            digest = zlib.crc32(callee._digest.to_bytes(4), digest)
        return digest

    def __call__(self, *args: Any) -> None:
        self.dispatcher(*args)

    def parallel_for(self, num_items: int, grain: int, *args: Any) -> None:
        """Run over items ``[0, num_items)``, shared with other threads where it pays.

        ``grain`` items take some 100 µs, about five times what waking a thread costs. While a
        :class:`kernels.cpu_graph.CpuGraph` records on this thread it also notes the call.
        """
        if num_items == 0:
            return
        if recording.note is not None:
            recording.note(self.dispatcher, num_items, grain, args)
        if num_items < 2 * grain or kernel_threads() == 1:
            self.dispatcher(*args, 0, num_items)
        else:
            from kernels.cpu_graph import run_shared

            run_shared(self.dispatcher, num_items, grain, args)


_num_threads: list[int] = []


def set_kernel_threads(num_threads: int) -> None:
    """How many threads of this process share a kernel's work, the caller among them."""
    _num_threads[:] = [num_threads]


def kernel_threads() -> int:
    """As set; torch's number while it is not."""
    return _num_threads[0] if _num_threads else torch.get_num_threads()


class _Recording(threading.local):
    """Who notes the calls of this thread's kernels."""

    note: Callable[[Any, int, int, tuple[Any, ...]], None] | None = None


recording = _Recording()


@functools.cache
def _warn_that_nothing_is_cached() -> None:
    logger.warning("no writable folder: every process compiles the CPU kernels anew; set NUMBA_CACHE_DIR")


def cpu_jit(fn: Callable[..., None]) -> CpuKernel:
    """Compile the decorated function with numba at its first call."""
    return CpuKernel(fn)


def cpu_intrinsic(make: Callable[[], Any]) -> CpuIntrinsic:
    """``make`` returns what :func:`numba.extending.intrinsic` does; it is called when a kernel compiles."""
    return CpuIntrinsic(make)
