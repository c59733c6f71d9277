"""Runs every launch of Triton's interpreter in a random order, on guarded operands, and checks it.

A launch whose constants and dtypes this process has not seen before runs twice, in different orders.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

from testing.kernels.hardened.accesses import AccessLog
from testing.kernels.hardened.operands import GuardedOperand
from testing.kernels.hardened.quick_types import quick_types

Run = Callable[..., None]
FILLINGS = (0xFF, 0x5A)
"""The bytes that belong to no operand: NaN in the first run, large numbers in the second."""


@contextmanager
def hardened(seed: int = 0) -> Iterator[None]:
    """Checks the launches in this block. New tensors have NaN or the largest integer in every element."""
    run: Run = InterpretedFunction.run
    order = random.Random(seed)

    def checked(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = _Launch(run, function, args, kwargs, grid)
        runs = [launch.run(filling, order.getrandbits(32)) for filling in FILLINGS[: launch.num_runs()]]
        for operand, others in zip(runs[0], zip(*runs[1:], strict=True), strict=False):
            for other in others:
                assert np.array_equal(operand.bits(), other.bits()), (
                    f"{function.__name__}: two runs from the same operands differ, by the order of programs "
                    "or by memory that belongs to no operand"
                )
        for operand in runs[0]:
            operand.copy_back()

    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # fills what torch.empty returns
    try:
        with (
            mock.patch.object(InterpretedFunction, "run", checked),
            _overflow_is_an_error(),
            mock.patch.object(interpreter.interpreter_builder, "create_dot", _product),
            quick_types(),
        ):
            yield
    finally:
        torch.set_deterministic_debug_mode(before)


_seen: set[tuple[object, ...]] = set()


@dataclass(frozen=True)
class _Launch:
    """One launch, as it was asked for."""

    run_in_interpreter: Run
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grid: Any

    @property
    def tensors(self) -> dict[str, Tensor]:
        named = dict(zip(self.function.arg_names, self.args, strict=False)) | self.kwargs
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def num_runs(self) -> int:
        """Returns 2 for a launch of a new kind. Operands that are too large to copy are used once."""
        if not all(GuardedOperand.fits(tensor) for tensor in self.tensors.values()):
            return 1
        constants = sorted(
            (name, str(value)) for name, value in self.kwargs.items() if not isinstance(value, Tensor)
        )
        kind = self.function.fn, *constants, *(tensor.dtype for tensor in self.tensors.values())
        if kind in _seen:
            return 1
        _seen.add(kind)
        return 2

    def run(self, filling: int, seed: int) -> list[GuardedOperand]:
        """Runs the kernel on copies of its operands, and returns the copies."""
        named: dict[str, GuardedOperand] = {}
        views: dict[tuple[Any, ...], tuple[str, GuardedOperand]] = {}
        for name, tensor in self.tensors.items():
            view = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            _, operand = views.setdefault(view, (name, GuardedOperand(tensor, filling)))
            named[name] = operand
        log = AccessLog({name: (operand.tensor, operand.is_copy) for name, operand in views.values()})
        names = iter(self.function.arg_names)
        args = [named[name].tensor if (name := next(names)) in named else arg for arg in self.args]
        kwargs = {name: named[name].tensor if name in named else arg for name, arg in self.kwargs.items()}
        with _watched(log, filling, random.Random(seed)):
            self.run_in_interpreter(self.function, *args, grid=self.grid, warmup=False, **kwargs)
        operands = [operand for _, operand in views.values()]
        for operand in operands:
            operand.assert_guards_are_whole()
        return operands


@contextmanager
def _watched(log: AccessLog, filling: int, order: random.Random) -> Iterator[None]:
    """Tells the log of every access, and runs programs in a random order."""
    builder = interpreter.interpreter_builder
    set_grid_dim, set_grid_idx = builder.set_grid_dim, builder.set_grid_idx
    load, store = builder.create_masked_load, builder.create_masked_store
    turns: list[int] = []

    def set_dim(*grid: int) -> None:
        turns[:] = order.sample(range(math.prod(grid)), math.prod(grid))
        set_grid_dim(*grid)

    def set_idx(*index: int) -> None:
        turn = int(np.ravel_multi_index(index, builder.grid_dim))
        log.start_program(turns[turn])
        set_grid_idx(*(int(place) for place in np.unravel_index(turns[turn], builder.grid_dim)))

    def watched_load(pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        log.load(pointers.data, mask.data)
        # Undefined on a GPU, zero in the interpreter, which passes a single zero as None too.
        if other is None and mask.data.size > 1 and not mask.data.all():
            other = _filled(pointers, filling)
        return load(pointers, mask, other, *rest)

    def watched_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        log.store(pointers.data, mask.data)
        return store(pointers, value, mask, *rest)

    with ExitStack() as stack:
        for name, stand_in in (
            ("set_grid_dim", set_dim),
            ("set_grid_idx", set_idx),
            ("create_masked_load", watched_load),
            ("create_masked_store", watched_store),
            ("create_barrier", log.pass_barrier),
        ):
            stack.enter_context(mock.patch.object(builder, name, stand_in))
        stack.enter_context(mock.patch.object(InterpretedFunction, "__call__", _without_patching_again()))
        yield


def _without_patching_again() -> Callable[..., Any]:
    """Returns what calls a function inside a program.

    Triton itself replaces its language's functions in every call, which takes a third of the time. Once for
    each module is enough in a launch.
    """
    call, patched = InterpretedFunction.__call__, set()

    def call_quickly(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.fn.__module__ in patched:
            return function.rewrite()(*args, **kwargs)
        patched.add(function.fn.__module__)
        return call(function, *args, **kwargs)

    return call_quickly


def _product(a: Any, b: Any, d: Any, *_: Any) -> TensorHandle:
    """Returns ``a b + d``, where a row does not depend on how many other rows there are, as on a GPU.

    A library's product adds up in an order of its own for each size, with AVX2 at least.
    """
    x, y = (_float16_of_float8(one).astype(d.data.dtype) for one in (a, b))
    return TensorHandle(np.einsum("...ik,...kn->...in", x, y) + d.data, d.dtype.scalar)


def _float16_of_float8(operand: Any) -> Any:
    if operand.dtype.primitive_bitwidth != 8 or not operand.dtype.is_floating():
        return operand.data
    return interpreter._convert_float(operand.data, operand.dtype, tl.float16, None).view(np.float16)


def _filled(pointers: Any, filling: int) -> TensorHandle:
    dtype = interpreter._get_np_dtype(pointers.get_element_ty())
    size = pointers.data.size * dtype.itemsize
    return TensorHandle(
        np.full(size, filling, np.uint8).view(dtype).reshape(pointers.data.shape), pointers.get_element_ty()
    )


@contextmanager
def _overflow_is_an_error() -> Iterator[None]:
    """Lets the interpreter raise where a product in int32 overflows, as those of indices and strides may.

    Unsigned numbers are hashed and bits of floats are added up, which may overflow.
    """
    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    check = semantic.binary_op_sanitize_overflow_impl

    def signed_products(left: Any, right: Any, operation: Any) -> None:
        if left.type.scalar.is_int_signed() and operation.__name__ == "mul":
            check(left, right, operation)

    options = replace(builder.options, debug=True)
    with (
        mock.patch.object(builder, "options", options),
        mock.patch.object(semantic, "binary_op_sanitize_overflow_impl", signed_products),
    ):
        yield
