"""Kernel calls that are recorded once and replayed without Python: the CPU's counterpart of a CUDA graph.

    graph = CpuGraph()
    with graph.record():
        y = model(x)             # every call is recorded, and all run at the end
    x.copy_(other); graph.replay()     # y is the model's output for the new x

As with a CUDA graph, tensors keep their addresses, decisions made while recording are not made again, and
results stay in place until the next replay. Only numba kernels are recorded. If torch computes, copies or
passes values to the host, a replay would lack that operation, so recording refuses it. Views and empty
tensors are allowed. (Computations of numpy can't be detected.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernels.cpu.call_list import CallList
from kernels.cpu.native_call import NativeCall
from kernels.cpu.threads import COLUMNS, ITEMS, Repeats, cpu_threads


class CpuGraph:
    """Calls in the order of their recording, with all arrays that they read and write."""

    def __init__(self) -> None:
        self._calls: list[NativeCall] = []
        self._table = np.zeros((0, COLUMNS), dtype=np.int64)

    @classmethod
    def joined(cls, *graphs: CpuGraph) -> CpuGraph:
        """Makes a graph that replays several, one after the other."""
        joined = cls()
        joined._calls = [call for graph in graphs for call in graph._calls]
        joined._table = np.concatenate([graph._table for graph in graphs])
        return joined

    @contextmanager
    def record(self) -> Generator[None]:
        """Records this thread's kernel calls. Raises :class:`RuntimeError` if torch computes anything."""
        calls = CallList()
        with calls.noting(), _NothingComputed():
            yield
        self._calls, self._table = calls.calls, calls.table()
        self.replay()

    def replay(self, repeats: Repeats | None = None) -> int:
        """Makes all calls again, once or more often. Returns how often."""
        return cpu_threads().run(self._table, repeats)

    def calls(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yields each call alone, with its kernel's name and number of items, for measuring their times."""
        for call, row in zip(self._calls, self._table, strict=True):
            name = call.name.strip("_").removesuffix("_cpu")
            yield f"{name} ({row[ITEMS]})", functools.partial(cpu_threads().run, row[None].copy())

    def __len__(self) -> int:
        return len(self._calls)


class _NothingComputed(TorchFunctionMode):
    """Allows torch operations that allocate tensors, make views or return shapes; refuses all others."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        if computes(name, args, kwargs or {}, found):
            raise RuntimeError(f"torch's {name} computes: a recorded step would leave it out when replayed")
        return found


def computes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> bool:
    """Return whether a function of torch reads, copies or writes values. Views and empty tensors don't."""
    if name.startswith(("empty", "new_empty")):
        return False
    if name in _READS or "out" in kwargs or kwargs.get("inplace") or is_in_place(name):
        return True
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(args)}
    return any(tensor.untyped_storage().data_ptr() not in known for tensor in tensors_in(found))


def is_in_place(name: str) -> bool:
    """Return whether a function of torch with this name overwrites its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__")


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors_in(value)


_READS = frozenset(
    ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose", "is_nonzero")
)
"""These functions pass values to the host; every replay would keep the host's first decision."""
