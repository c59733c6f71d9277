"""Calls of kernels on the simulated GPU.

A kernel's function picks Triton or its CPU path by the device of its operands. Here it does both. At the call
it takes the way of a GPU, up to Triton's launches, which are noted and not run: this makes the results'
tensors, and shows an operator that would wait. Then its CPU path is queued, and fills the results when the
queue comes to it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from unittest.mock import patch

from torch import Tensor

from kernels.gpu.triton_jit import triton
from testing.simulated_gpu.device_tensor import DeviceTensor, leaves, mapped

CALLERS = ("engine.",)
"""Packages whose calls of kernels are queued."""


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Queues(Protocol):
    """What calls of kernels need of the device."""

    @property
    def is_executing(self) -> bool: ...

    def dry_run(self) -> AbstractContextManager[None]: ...

    def queue(self, run: Callable[[], None]) -> None: ...

    def launched(self, launch: Launch) -> None: ...


@contextmanager
def queued_kernels(gpu: Queues) -> Iterator[None]:
    """Queue the kernels that the engine calls, while the context lasts."""
    with _noted_launches(gpu):
        undo = list(_replace_all(gpu))
        try:
            yield
        finally:
            for owner, name, original in undo:
                setattr(owner, name, original)


@contextmanager
def _noted_launches(gpu: Queues) -> Iterator[None]:
    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        gpu.launched(Launch(kernel, grid, args, kwargs))

    from triton.runtime.interpreter import InterpretedFunction

    with patch.object(triton.runtime.JITFunction, "run", run), patch.object(InterpretedFunction, "run", run):
        yield


def _replace_all(gpu: Queues) -> Iterator[tuple[Any, str, Any]]:
    """Replace every kernel that a caller's module has imported; yield what was there."""
    classes = set()
    for module in [one for name, one in sys.modules.items() if name.startswith(CALLERS)]:
        for name, value in list(vars(module).items()):
            if not getattr(value, "__module__", "").startswith("kernels."):
                continue
            if inspect.isfunction(value):
                yield module, name, value
                setattr(module, name, queued(gpu, value))
            elif inspect.isclass(value) and "__call__" in vars(value):
                classes.add(value)
    for kind in classes:
        yield kind, "__call__", kind.__call__
        kind.__call__ = queued(gpu, kind.__call__)


def queued(gpu: Queues, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that queues ``kernel`` if an operand is on the device."""

    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        if gpu.is_executing or not _has_device_tensor(args, kwargs):
            return kernel(*args, **kwargs)
        with gpu.dry_run():
            results = kernel(*args, **kwargs)
        held_args, held_kwargs = mapped(_hold, (args, kwargs))
        places = [one.plain for one in leaves(results) if isinstance(one, DeviceTensor)]

        def run() -> None:
            computed = [one for one in leaves(kernel(*held_args, **held_kwargs)) if isinstance(one, Tensor)]
            for place, one in zip(places, computed, strict=True):
                if place.data_ptr() != one.data_ptr():
                    place.copy_(one)

        gpu.queue(run)
        return results

    return call


def _has_device_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(
        isinstance(one, DeviceTensor) or any(isinstance(part, DeviceTensor) for part in vars_of(one))
        for one in leaves((args, kwargs))
    )


def vars_of(value: Any) -> tuple[Any, ...]:
    return tuple(vars(value).values()) if hasattr(value, "__dict__") and not inspect.isclass(value) else ()


def _hold(value: Any) -> Any:
    """Keep the memory but not the tensor, whose life says how long a graph needs the memory."""
    return value.plain if isinstance(value, DeviceTensor) else value
