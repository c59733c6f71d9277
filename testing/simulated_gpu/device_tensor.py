"""Tensors of the simulated GPU: they are in CPU memory, and queue the operators that are called on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class Device(Protocol):
    """What a tensor needs of its device."""

    device: torch.device

    @property
    def is_executing(self) -> bool: ...

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def to_host(self, tensor: Tensor, *, non_blocking: bool) -> Tensor: ...


class DeviceTensor(Tensor):
    """A tensor that says that it is on a GPU; while a queued operation runs, it says that it is on a CPU."""

    gpu: Device
    plain: Tensor
    """The same memory as a CPU tensor, or a tensor of torch's meta device."""
    base: Tensor | None
    """Of a view, the tensor whose memory it uses, which lives as long as the view."""

    @classmethod
    def wrap(cls, plain: Tensor, gpu: Device, base: Tensor | None = None) -> DeviceTensor:
        tensor = Tensor._make_subclass(cls, plain)
        tensor.gpu, tensor.plain, tensor.base = gpu, plain, base
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        gpu = next(one.gpu for one in _flat(args, kwargs) if isinstance(one, DeviceTensor))
        return gpu.dispatch(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.gpu.is_executing else self.gpu.device

    @property
    def is_cuda(self) -> bool:
        return not self.gpu.is_executing

    @property
    def is_cpu(self) -> bool:
        return self.gpu.is_executing

    def get_device(self) -> int:
        return -1 if self.gpu.is_executing else self.gpu.device.index

    def numpy(self) -> np.ndarray:
        if not self.gpu.is_executing:
            raise TypeError("a tensor of a GPU can't be converted to numpy; copy it to the host first")
        return self.plain.numpy()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def cpu(self) -> Tensor:
        return self.to("cpu")

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Tensor:
        return self

    def pin_memory(self) -> Tensor:
        raise RuntimeError("only memory of the host can be pinned")

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.gpu.is_executing:
            return self.plain.to(*args, **kwargs)
        device, dtype, non_blocking, copies = arguments_of_to(*args, **kwargs)
        moved = self if dtype is None else Tensor.to(self, dtype, copy=copies)
        if device is None or device.type == self.gpu.device.type:
            return moved
        return self.gpu.to_host(moved, non_blocking=non_blocking)


def arguments_of_to(
    *args: Any,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> tuple[torch.device | None, torch.dtype | None, bool, bool]:
    """Return device, dtype, non_blocking and copy from the arguments of ``Tensor.to`` in all its forms."""
    for one in args:
        if isinstance(one, Tensor):
            device, dtype = one.device, one.dtype
        elif isinstance(one, (torch.device, str)):
            device = one
        elif isinstance(one, torch.dtype):
            dtype = one
        elif isinstance(one, bool):
            non_blocking = one
    return None if device is None else torch.device(device), dtype, non_blocking, copy


def plain(tree: Any) -> Any:
    """Return ``tree`` with the CPU tensor in the place of each tensor of the device."""
    return mapped(lambda one: one.plain if isinstance(one, DeviceTensor) else one, tree)


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``tree`` with each leaf changed. Operators' arguments are plain containers: torch's own
    ``tree_map`` looks each leaf up among the kinds of containers, and would take a third of a test's time."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([mapped(change, one) for one in tree])
    if kind is dict:
        return {key: mapped(change, one) for key, one in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return kind(*(mapped(change, one) for one in tree))
    return change(tree)


def leaves(tree: Any) -> list[Any]:
    """Return what :func:`mapped` would change, in order."""
    found: list[Any] = []
    mapped(found.append, tree)
    return found


def _flat(args: Any, kwargs: Any) -> Any:
    for one in (*args, *(kwargs or {}).values()):
        if isinstance(one, (list, tuple)):
            yield from _flat(one, None)
        else:
            yield one
