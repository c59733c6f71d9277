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
import struct
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.cpu.compiler import CpuIntrinsic

_numbers = itertools.count()
_WORD, _DOUBLE, _FLOAT = map(struct.Struct, ("q", "d", "fi"))
_STAND_INS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
"""Types that numpy lacks, and the integers that kernels get instead (:mod:`kernels.cpu.vector`)."""


class FlatArray:
    """The memory from a strided CPU tensor's first element to its last, as a kernel's contiguous array.

    Numba vectorizes a loop only if it knows that the stride is one. A kernel gets a pool's view as this
    array and ``tensor.stride()``, and slices the innermost axis out of it.
    """

    __slots__ = ("_array", "num_elements", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._array: np.ndarray | None = None
        self.num_elements = tensor.numel()
        if not tensor.is_contiguous() and self.num_elements:
            self.num_elements = 1
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
                self.num_elements += (size - 1) * stride

    def numpy(self) -> np.ndarray:
        """Return this array. bfloat16 is returned as uint16, float8_e4m3fn as uint8."""
        if self._array is None:
            is_whole = self.tensor.is_contiguous()
            flat = self.tensor if is_whole else self.tensor.as_strided((self.num_elements,), (1,))
            self._array = as_array(flat).reshape(-1)
        return self._array


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a CPU tensor as an array. Strides are kept, nothing is copied."""
    if tensor.dtype in _STAND_INS:
        tensor = tensor.view(_STAND_INS[tensor.dtype])
    return tensor.detach().numpy() if tensor.requires_grad else tensor.numpy()


@dataclass(slots=True)
class NativeCall:
    """One kernel bound to all its arguments except ``begin`` and ``end``. Keeps arrays and code alive.

    An argument is an array, a tensor, a :class:`FlatArray`, a number, or a tuple of these.
    """

    name: str
    trampoline: int
    kernel: int
    block: array[int]
    arguments: tuple[Any, ...]
    _code: _Code

    @classmethod
    def bind(cls, dispatcher: Any, args: tuple[Any, ...]) -> NativeCall:
        """Bind a kernel to its arguments; compiles the kernel for their types if necessary."""
        kinds: list[Any] = [dispatcher]
        words: list[int] = []
        _bind(args, kinds, words)
        key = tuple(kinds)
        code = _codes.get(key)
        if code is None:
            code = _codes[key] = _Code.of(dispatcher, args)
        return cls(code.name, code.trampoline, code.kernel, array("q", words), args, code)

    @property
    def addresses(self) -> tuple[int, int, int]:
        """The addresses of trampoline, kernel and block."""
        return self.trampoline, self.kernel, self.block.buffer_info()[0]


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

        signature = (*map(_type_of, args), numba.int64, numba.int64)
        compiled = dispatcher.overloads.get(signature)
        if compiled is None:
            dispatcher.compile(signature)
            compiled = dispatcher.overloads[signature]
        kernel = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
        trampoline = _trampoline(signature, compiled.target_context)
        return cls(dispatcher.py_func.__name__, trampoline, kernel, compiled)


_codes: dict[tuple[Any, ...], _Code] = {}
"""By kernel and kinds of arguments. Numba takes about 10 µs to find the type of one array."""


def _bind(args: tuple[Any, ...], kinds: list[Any], words: list[int]) -> None:
    """Append one word for each value of the kernel's signature, and what the arguments' types in numba depend
    on. Whole numbers are the rule and leave no kind; all others note their place.

    This is one loop, since a call of Python for each argument takes longer than the rest.
    """
    for arg in args:
        kind = type(arg)
        if kind is int:
            words.append(arg)
        elif kind is FlatArray:
            tensor, size = arg.tensor, arg.num_elements
            itemsize = tensor.itemsize
            kinds += len(words), FlatArray, tensor.dtype
            words += 0, 0, size, itemsize, tensor.data_ptr(), size, itemsize
        elif kind is tuple:
            kinds.append(-len(arg))
            _bind(arg, kinds, words)
        elif kind is torch.Tensor or isinstance(arg, torch.Tensor):
            itemsize, strides = arg.itemsize, arg.stride()
            kinds += len(words), arg.dtype, len(strides), arg.is_contiguous()
            words += 0, 0, arg.numel(), itemsize, arg.data_ptr(), *arg.shape
            words += [stride * itemsize for stride in strides]
        elif isinstance(arg, np.ndarray):
            kinds += len(words), arg.dtype, arg.ndim, arg.flags.num
            words += 0, 0, arg.size, arg.itemsize, arg.ctypes.data, *arg.shape, *arg.strides
        else:
            kinds += len(words), kind
            words.append(_number_word(arg))


def _number_word(number: Any) -> int:
    if isinstance(number, np.float32):
        return int(_WORD.unpack(_FLOAT.pack(number, 0))[0])
    if isinstance(number, float):
        return int(_WORD.unpack(_DOUBLE.pack(number))[0])
    return int(number)


def as_arrays(args: tuple[Any, ...]) -> list[Any]:
    """Return a call's arguments as numba's dispatcher takes them."""
    found = []
    for arg in args:
        kind = type(arg)
        if kind is FlatArray:
            found.append(arg.numpy())
        elif kind is tuple and arg and type(arg[0]) is FlatArray:
            found.append(tuple(as_arrays(arg)))
        elif isinstance(arg, torch.Tensor):
            found.append(as_array(arg))
        else:
            found.append(arg)
    return found


def _type_of(arg: Any) -> Any:
    """Return an argument's type in numba."""
    import numba

    if isinstance(arg, FlatArray):
        return numba.typeof(arg.numpy())
    if isinstance(arg, torch.Tensor):
        layout = "C" if arg.is_contiguous() else "A"
        return numba.typeof(as_array(arg)).copy(layout=layout)
    if isinstance(arg, tuple):
        return numba.types.BaseTuple.from_types(tuple(map(_type_of, arg)))
    return numba.typeof(arg)


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


@CpuIntrinsic
def call_trampoline() -> Any:
    """``call(trampoline, kernel, block, begin, end)``"""
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        integer = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [integer] * 4)  # pointers are passed like integers
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    signature = types.void(*[types.int64] * 5)
    return intrinsic(lambda context, trampoline, kernel, block, begin, end: (signature, generate))
