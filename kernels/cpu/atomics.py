"""What CPU kernels need to work with other threads and processes: words of memory that they share, and
calls of C functions.

Words are int64, given by their addresses. Each operation happens at once for all threads, after everything
that its thread did before (sequential consistency).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from kernels.cpu.compiler import CpuIntrinsic, cpu_function

_CLOCK_MONOTONIC, _CLOCK_THREAD_CPUTIME_ID = 1, 3  # on Linux


@functools.cache
def c_function(name: str) -> int:
    """Returns the address of a function of the C library."""
    return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0


def _atomic(generate: Any, num_args: int) -> Any:
    """Returns an intrinsic with int64 arguments, the first an address, and an int64 result."""
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return generate(builder, pointer, *args[1:])

    if num_args == 1:
        return intrinsic(lambda context, a: (types.int64(types.int64), build))
    if num_args == 2:
        return intrinsic(lambda context, a, b: (types.int64(types.int64, types.int64), build))
    return intrinsic(lambda context, a, b, c: (types.int64(types.int64, types.int64, types.int64), build))


@CpuIntrinsic
def load_word() -> Any:
    """``load_word(address)``"""
    return _atomic(lambda builder, p: builder.load_atomic(p, "seq_cst", 8), 1)


@CpuIntrinsic
def store_word() -> Any:
    """``store_word(address, value)``"""

    def generate(builder: Any, p: Any, value: Any) -> Any:
        builder.store_atomic(value, p, "seq_cst", 8)
        return value

    return _atomic(generate, 2)


@CpuIntrinsic
def add_to_word() -> Any:
    """``add_to_word(address, value)``; the result is the value before."""
    return _atomic(lambda builder, p, value: builder.atomic_rmw("add", p, value, "seq_cst"), 2)


@CpuIntrinsic
def swap_word() -> Any:
    """``swap_word(address, expected, new)`` is 1 if it swapped, else 0."""

    def generate(builder: Any, p: Any, expected: Any, new: Any) -> Any:
        from llvmlite import ir

        pair = builder.cmpxchg(p, expected, new, "seq_cst", "seq_cst")
        return builder.zext(builder.extract_value(pair, 1), ir.IntType(64))

    return _atomic(generate, 3)


@CpuIntrinsic
def call_c() -> Any:
    """``call_c(function, a, b, c, d)`` calls a C function of up to four words and ignores its result."""
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64)] * 4)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return intrinsic(lambda context, function, a, b, c, d: (types.void(*[types.int64] * 5), generate))


@cpu_function
def monotonic_ns(clock_gettime, room):
    """Returns the time of a clock that only rises. ``room`` is the address of two words to use."""
    call_c(clock_gettime, _CLOCK_MONOTONIC, room, 0, 0)
    return load_word(room) * 1_000_000_000 + load_word(room + 8)


@cpu_function
def thread_ns(clock_gettime, room):
    """Returns the CPU time of this thread. ``room`` is the address of two words to use."""
    call_c(clock_gettime, _CLOCK_THREAD_CPUTIME_ID, room, 0, 0)
    return load_word(room) * 1_000_000_000 + load_word(room + 8)
