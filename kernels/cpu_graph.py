"""Kernel calls recorded once and replayed without Python: on a CPU what a CUDA graph is on a GPU.

    graph = CpuGraph()
    with graph.record():
        y = model(x)             # runs, and is noted call by call
    x.copy_(other); graph.replay()     # y is the model of the new x

As with a CUDA graph tensors keep their addresses, nothing that was decided while recording is decided again,
and results stay where they are until the next replay. Only numba kernels are noted. A torch operator that
computes would be missing from every replay, so recording refuses it; views and empty tensors pass. (Values
read on the host, with ``tolist`` or numpy, can't be caught: a kernel has to read them itself.)
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu_jit import recording
from kernels.cpu_threads import COLUMNS, MOST_SHARES, cpu_threads
from kernels.native_call import NativeCall

_SHARES_A_GRAIN = 8
"""In a graph a share takes some 12 µs: helpers are awake, claiming one costs a tenth of a µs."""


class CpuGraph:
    """Calls in the order in which they were recorded, with all they read and write."""

    def __init__(self) -> None:
        self._calls: list[NativeCall] = []
        self._rows: list[tuple[int, ...]] = []
        self._table = np.zeros((0, COLUMNS), dtype=np.int64)

    @contextmanager
    def record(self) -> Generator[None]:
        """Notes this thread's kernel calls. Raises :class:`RuntimeError` where torch computes."""
        recording.note = self._note
        try:
            with _NothingComputed():
                yield
        finally:
            recording.note = None
        self._table = np.array(self._rows, dtype=np.int64).reshape(-1, COLUMNS)

    def replay(self) -> None:
        """Makes all calls again."""
        cpu_threads().run(self._table)

    def __len__(self) -> int:
        return len(self._calls)

    def _note(self, dispatcher: Any, num_items: int, grain: int, args: tuple[Any, ...]) -> None:
        call = NativeCall.bind(dispatcher, args)
        self._calls.append(call)
        self._rows.append(_row(call, num_items, num_items * _SHARES_A_GRAIN // grain))


def run_shared(dispatcher: Any, num_items: int, grain: int, args: tuple[Any, ...]) -> None:
    """Makes one call, shared with this process's helpers."""
    call = NativeCall.bind(dispatcher, args)
    cpu_threads().run(np.array([_row(call, num_items, 4 * num_items // grain)], dtype=np.int64))


def _row(call: NativeCall, num_items: int, num_shares: int) -> tuple[int, ...]:
    return *call.addresses, num_items, max(1, min(num_shares, num_items, MOST_SHARES))


class _NothingComputed(TorchDispatchMode):
    """Lets through what gives memory or looks at it in another way."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_view(func) and not func.overloadpacket.__name__.startswith(("empty", "new_empty")):
            raise RuntimeError(f"{func} computes: a recorded step would leave it out when it is replayed")
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    infos = [result.alias_info for result in func._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)
