"""Calls of numba kernels as plain data, so that native code can make them without Python.

A call consists of three addresses: the kernel's machine code, a block of 64-bit words with its arguments, and
a trampoline ``(kernel, block, begin, end)`` that passes the words as the kernel's signature requires.
Trampolines depend only on types; there are about as many of them as kernels.

Numba's compiled functions call each other in this way: two pointers for result and exception come first, an
array is passed as its fields ``meminfo, parent, nitems, itemsize, data, shape…, strides…``, and a tuple as
its elements.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_numbers = itertools.count()


@dataclass(frozen=True)
class NativeCall:
    """One kernel bound to all its arguments except ``begin`` and ``end``. Keeps arrays and code alive."""

    name: str
    trampoline: int
    kernel: int
    block: NDArray[np.int64]
    _keeps: tuple[Any, ...]

    @classmethod
    def bind(cls, dispatcher: Any, args: tuple[Any, ...]) -> NativeCall:
        """Bind a kernel to its arguments; compiles the kernel for their types if necessary."""
        key = dispatcher, *map(_kind, args)
        code = _codes.get(key)
        if code is None:
            code = _codes[key] = _Code.of(dispatcher, args)
        words = [word for arg in args for word in _words(arg)]
        return cls(code.name, code.trampoline, code.kernel, np.array(words, dtype=np.int64), (code, args))

    @property
    def addresses(self) -> tuple[int, int, int]:
        """The addresses of trampoline, kernel and block."""
        return self.trampoline, self.kernel, self.block.ctypes.data


@dataclass(frozen=True)
class _Code:
    """A kernel compiled for arguments of some types."""

    name: str
    trampoline: int
    kernel: int
    _keeps: Any

    @classmethod
    def of(cls, dispatcher: Any, args: tuple[Any, ...]) -> _Code:
        import numba

        signature = (*map(numba.typeof, args), numba.int64, numba.int64)
        compiled = dispatcher.overloads.get(signature)
        if compiled is None:
            dispatcher.compile(signature)
            compiled = dispatcher.overloads[signature]
        kernel = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
        trampoline = _trampoline(signature, compiled.target_context)
        return cls(dispatcher.py_func.__name__, trampoline, kernel, compiled)


_codes: dict[tuple[Any, ...], _Code] = {}
"""By kernel and kinds of arguments. Numba takes about 10 µs to find the type of one array."""


def _kind(arg: Any) -> Any:
    """Return what the type that numba gives an argument depends on."""
    if isinstance(arg, np.ndarray):
        return arg.dtype, arg.ndim, arg.flags.num
    if isinstance(arg, tuple):
        return tuple(map(_kind, arg))
    return type(arg)


def _words(arg: Any) -> list[int]:
    """Return an argument's words, one for each value of the kernel's signature."""
    if isinstance(arg, np.ndarray):
        return [0, 0, arg.size, arg.itemsize, arg.ctypes.data, *arg.shape, *arg.strides]
    if isinstance(arg, tuple):
        return [word for element in arg for word in _words(element)]
    if isinstance(arg, np.float32):
        return [int(np.array([arg, 0], dtype=np.float32).view(np.int64)[0])]
    if isinstance(arg, float):
        return [int(np.array([arg]).view(np.int64)[0])]
    return [int(arg)]


@functools.cache
def _trampoline(signature: tuple[Any, ...], context: Any) -> int:
    """``void (int64 kernel, int64* block, int64 begin, int64 end)``"""
    from llvmlite import ir
    from numba.core import types

    function_type = context.call_conv.get_function_type(types.none, signature)
    module = ir.Module()
    integer = ir.IntType(64)
    arguments = [integer, integer.as_pointer(), integer, integer]
    name = f"twinfang_trampoline_{next(_numbers)}"
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
    builder = ir.IRBuilder(function.append_basic_block())
    kernel, block, begin, end = function.args
    result, error = (builder.alloca(pointer.pointee) for pointer in function_type.args[:2])
    passed = [result, error]
    for index, kind in enumerate(function_type.args[2:-2]):
        word = builder.gep(block, [ir.Constant(integer, index)])
        passed.append(builder.load(builder.bitcast(word, kind.as_pointer())))
    builder.call(builder.inttoptr(kernel, function_type.as_pointer()), [*passed, begin, end])
    builder.ret_void()
    return _machine_code(module, name)


def _machine_code(module: Any, name: str) -> int:
    """Return the address of a module's function, compiled without optimization: that takes a quarter of the
    time that numba takes, and there is nothing to optimize."""
    import llvmlite.binding as llvm
    from numba.core.compiler_lock import global_compiler_lock

    with global_compiler_lock:
        engine = _engine()
        engine.add_module(llvm.parse_assembly(str(module)))
        engine.finalize_object()
        return int(engine.get_function_address(name))


@functools.cache
def _engine() -> Any:
    """Return the owner of the trampolines' code. Numba has initialized LLVM by then."""
    import llvmlite.binding as llvm

    machine = llvm.Target.from_default_triple().create_target_machine(opt=0)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
