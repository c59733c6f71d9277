"""Copies pages between two tables of places in memory by one call.

A copy of a tensor's slice takes Python and torch 5 µs, as long as the bytes of a block of 32 KiB need. Here a
page takes nothing but its bytes, and the interpreter's lock is free meanwhile.

The bytes go past the core's caches. A plain copy reads each line before it overwrites it, and what is copied
to host memory is not read soon. 85 pages of 16 KiB, on one thread of a shared AVX-512 machine: 138 µs from
host memory and 107 µs to it, with the C library's ``memcpy`` 173 and 175 µs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.atomics import c_function, call_c
from kernels.cpu.compiler import CpuIntrinsic
from kernels.cpu.jit import cpu_jit

GRAIN_BYTES = 1 << 20
"""So much is copied in about 100 µs."""
LINE_BYTES = 64


def copy_pages(
    into: NDArray[np.int64], targets: Sequence[int], out_of: NDArray[np.int64], sources: Sequence[int]
) -> None:
    """Copy page ``sources[i]`` of the places ``out_of`` to page ``targets[i]`` of the places ``into``.

    Places are ``[2, n]``, contiguous: the addresses of pages in this process's memory, and their lengths in
    bytes. If the lengths of both differ, the shorter one is copied. No page overlaps another one. Nothing
    checks that. Pages are copied fast to addresses that are multiples of :data:`LINE_BYTES`. The first call
    compiles the kernel, also if there is nothing to copy.
    """
    pages = np.array(targets, dtype=np.int64), np.array(sources, dtype=np.int64)
    if not targets:
        _copy_pages(into, pages[0], out_of, pages[1], c_function("memcpy"), 0, 0)
        return
    grain = max(1, GRAIN_BYTES // max(1, int(into[1, targets[0]])))
    _copy_pages.parallel_for(len(targets), grain, into, pages[0], out_of, pages[1], c_function("memcpy"))


def copy_pages_reference(
    into: NDArray[np.int64], targets: Sequence[int], out_of: NDArray[np.int64], sources: Sequence[int]
) -> None:
    """The same as :func:`copy_pages`, page by page."""
    for target, source in zip(targets, sources, strict=True):
        length = min(into[1, target], out_of[1, source])
        ctypes.memmove(int(into[0, target]), int(out_of[0, source]), int(length))


@cpu_jit
def _copy_pages(into, targets, out_of, sources, memcpy, begin, end):
    for i in range(begin, end):
        target, source = into[0, targets[i]], out_of[0, sources[i]]
        next_source = out_of[0, sources[min(i + 1, end - 1)]]
        length = min(into[1, targets[i]], out_of[1, sources[i]])
        streamed = length - length % LINE_BYTES if target % LINE_BYTES == 0 else 0
        for place in range(0, streamed, LINE_BYTES):
            _stream_line(target + place, source + place, next_source + place)
        call_c(memcpy, target + streamed, source + streamed, length - streamed, 0)
    _fence(0)


@CpuIntrinsic
def _stream_line() -> Any:
    """``_stream_line(into, out_of, next)`` copies a line past the caches, and fetches the line at ``next``,
    which may be any address. ``into`` is a multiple of a line's size."""
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    word, byte_pointer = ir.IntType(32), ir.IntType(8).as_pointer()
    line = ir.VectorType(ir.IntType(64), LINE_BYTES // 8).as_pointer()
    prefetch = ir.FunctionType(ir.VoidType(), [byte_pointer, word, word, word])

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into, out_of, next_one = args
        fetch = cgutils.get_or_insert_function(builder.module, prefetch, "llvm.prefetch.p0i8")
        for_reading, second_level, data = word(0), word(2), word(1)
        builder.call(fetch, [builder.inttoptr(next_one, byte_pointer), for_reading, second_level, data])
        bytes_ = builder.load(builder.inttoptr(out_of, line), align=1)
        stored = builder.store(bytes_, builder.inttoptr(into, line), align=LINE_BYTES)
        stored.set_metadata("nontemporal", builder.module.add_metadata([word(1)]))
        return context.get_dummy_value()

    return intrinsic(lambda context, into, out_of, next: (types.void(*[types.int64] * 3), generate))


@CpuIntrinsic
def _fence() -> Any:
    """``_fence(0)`` lets other threads see what was copied past the caches before what is stored later."""
    from numba.core import types
    from numba.extending import intrinsic

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return intrinsic(lambda context, unused: (types.void(types.int64), generate))
