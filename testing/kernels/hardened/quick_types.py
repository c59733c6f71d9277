"""Types of Triton's interpreter that are computed once.

Each operation of an interpreted kernel makes a tensor and its type, and works out again what follows from the
shape. These functions look it up by the type's name. That takes a third off a kernel's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_init_type, _init_tensor = core.block_type.__init__, core.tensor.__init__
_np_dtype, _broadcast = interpreter._get_np_dtype, TritonSemantic.broadcast_impl_value
_types: dict[tuple[Any, ...], dict[str, Any]] = {}
_tensors: dict[str, dict[str, Any]] = {}
_np_dtypes: dict[str, Any] = {}


@contextmanager
def quick_types() -> Iterator[None]:
    """Let the interpreter look types up while the context lasts."""
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (core.block_type, "__init__", _quick_type),
            (core.tensor, "__init__", _quick_tensor),
            (interpreter, "_get_np_dtype", _quick_np_dtype),
            (TritonSemantic, "broadcast_impl_value", _quick_broadcast),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def _quick_type(self: Any, element_ty: Any, shape: Any) -> None:
    key = element_ty.name, *(one.value if isinstance(one, core.constexpr) else one for one in shape)
    if key not in _types:
        _init_type(self, element_ty, shape)
        _types[key] = dict(vars(self))
    vars(self).update(_types[key])
    self.element_ty = element_ty


def _quick_tensor(self: Any, handle: Any, type: Any) -> None:
    if type.name not in _tensors:
        _init_tensor(self, handle, type)
        _tensors[type.name] = {name: one for name, one in vars(self).items() if name != "handle"}
    vars(self).update(_tensors[type.name])
    self.handle, self.type, self.dtype = handle, type, type.scalar


def _quick_np_dtype(dtype: Any) -> Any:
    if dtype.name not in _np_dtypes:
        _np_dtypes[dtype.name] = _np_dtype(dtype)
    return _np_dtypes[dtype.name]


def _quick_broadcast(self: Any, left: Any, right: Any) -> Any:
    if left.type.is_block() and right.type.is_block() and [*left.type.shape] == [*right.type.shape]:
        return left, right
    return _broadcast(self, left, right)
