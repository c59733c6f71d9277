"""Copies many ranges of bytes by one call.

A copy of a tensor's slice takes Python and torch 5 µs, as long as the bytes of a block of 32 KiB need. Here a
range takes nothing but its bytes, and the interpreter's lock is free meanwhile.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.atomics import c_function, call_c
from kernels.cpu.jit import cpu_jit

GRAIN_BYTES = 1 << 19
"""So much is copied in about 100 µs."""


def copy_ranges(ranges: NDArray[np.int64]) -> None:
    """Copy ranges of this process's memory. No range overlaps another one.

    ``ranges``: ``[3, n]``, contiguous: to which address each range is copied, from which address, and its
    length in bytes. Nothing checks them. The first call compiles the kernel, also with no ranges.
    """
    num_ranges = ranges.shape[1]
    if not num_ranges:
        _copy_ranges(ranges, c_function("memcpy"), 0, 0)
        return
    grain = max(1, GRAIN_BYTES // max(1, int(ranges[2, 0])))
    _copy_ranges.parallel_for(num_ranges, grain, ranges, c_function("memcpy"))


def copy_ranges_reference(ranges: NDArray[np.int64]) -> None:
    """The same as :func:`copy_ranges`, range by range."""
    for into, out_of, length in ranges.T.tolist():
        ctypes.memmove(into, out_of, length)


@cpu_jit
def _copy_ranges(ranges, memcpy, begin, end):
    for i in range(begin, end):
        call_c(memcpy, ranges[0, i], ranges[1, i], ranges[2, i], 0)
