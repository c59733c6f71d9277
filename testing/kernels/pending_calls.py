"""Finds computations of torch that should have waited for noted kernel calls.

A batch of noted calls (:mod:`kernels.cpu.call_list`) runs after what torch computes meanwhile. That is wrong
if torch read what a call writes later, or overwrote what a call reads later. Results rarely show it, so a
test watches each family of models.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernels.cpu.call_list import Batch, CallList
from kernels.cpu.graph import computes, is_in_place, tensors_in
from kernels.cpu.native_call import FlatArray

_HARMLESS = frozenset(
    ("__get__", "__len__", "stride", "numel", "data_ptr", "is_contiguous", "dim", "size", "element_size")
)
"""What binding a call asks of a tensor, thousands of times in a step. Properties are ``__get__``."""


class _Watch(TorchFunctionMode):
    """Watches what torch reads and writes until a batch runs."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self._batch = batch
        self._read: list[tuple[str, Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in _HARMLESS:
            return func(*args, **kwargs)
        if is_in_place(name) and self._is_pending(args[0]):
            raise RuntimeError(f"torch's {name} overwrites a tensor of a call that has not run: settle first")
        found = func(*args, **kwargs)
        if computes(name, args, kwargs, found):
            tensors = [one for one in tensors_in([*args, *kwargs.values()]) if self._is_pending(one)]
            self._read += [(name, one, one.clone()) for one in tensors]
        return found

    def check(self) -> None:
        """Raise :class:`RuntimeError` if calls that ran now changed what torch has read before them."""
        for name, tensor, before in self._read:
            if not torch.equal(tensor.contiguous().view(torch.uint8), before.contiguous().view(torch.uint8)):
                raise RuntimeError(f"torch's {name} read a tensor before a call wrote it: settle first")
        self._read.clear()

    def _is_pending(self, tensor: Tensor) -> bool:
        own = _range(FlatArray(tensor))
        return any(
            own[0] < end and first < own[1]
            for call in self._batch.calls
            for first, end in _ranges(call.arguments)
        )


def _ranges(values: Any) -> Iterator[tuple[int, int]]:
    """Yield the first address and the end of all arrays."""
    for value in values:
        if isinstance(value, tuple):
            yield from _ranges(value)
        elif isinstance(value, Tensor):
            yield _range(FlatArray(value))
        elif isinstance(value, FlatArray):
            yield _range(value)
        elif isinstance(value, np.ndarray):
            yield value.ctypes.data, value.ctypes.data + value.nbytes


def _range(memory: FlatArray) -> tuple[int, int]:
    first = memory.tensor.data_ptr()
    return first, first + memory.num_elements * memory.tensor.itemsize


def watch_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every batch of this process refuse what should have waited for it."""
    settle, noting = Batch.settle, CallList.noting
    watches: dict[Batch, _Watch] = {}

    def settled(batch: Batch) -> None:
        settle(batch)
        if batch in watches:
            watches[batch].check()

    @contextmanager
    def watched(calls: CallList) -> Generator[None]:
        if not isinstance(calls, Batch):
            with noting(calls):
                yield
            return
        watches[calls] = _Watch(calls)
        with noting(calls), watches[calls]:
            yield
        settled(calls)
        del watches[calls]

    monkeypatch.setattr(Batch, "settle", settled)
    monkeypatch.setattr(CallList, "noting", watched)
