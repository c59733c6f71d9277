"""Kernel calls that are noted instead of made, to be run later without Python between them.

A prompt's step notes some calls, runs them, and notes the next ones (:func:`batched_calls`). So the calls of
a batch follow each other at once, and the helpers (:mod:`kernels.cpu.threads`) take part in short ones too. A
:class:`kernels.cpu.graph.CpuGraph` keeps its calls and runs them in every step.

Only calls of :meth:`kernels.cpu.jit.CpuKernel.parallel_for` are noted. What torch or numpy computes in
between happens before them. Such code calls :func:`kernels.cpu.jit.settle` first, which a graph refuses.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.jit import noted
from kernels.cpu.native_call import NativeCall
from kernels.cpu.threads import COLUMNS, MOST_OFFERED, SHARES, cpu_threads, table_row

MOST_CALLS = MOST_OFFERED
LONG_CALLS, LONG_SHARES = 16, 1024
"""Sixteen calls of so many shares take some fifty times as long as noting them. They are two layers or so,
and what they read and write stays in memory until they have run."""


class CallList:
    """Calls in the order in which they were noted. Keeps alive what they read and write."""

    def __init__(self) -> None:
        self.calls: list[NativeCall] = []
        self._rows: list[tuple[int, ...]] = []

    def note(self, dispatcher: Any, num_items: int, grain: int, args: tuple[Any, ...]) -> None:
        """Adds a call. ``grain`` items take about 100 µs."""
        call = NativeCall.bind(dispatcher, args)
        self.calls.append(call)
        self._rows.append(table_row(call, num_items, grain))

    def table(self) -> NDArray[np.int64]:
        """Returns the calls for :meth:`kernels.cpu.threads.CpuThreads.run`."""
        return np.array(self._rows, dtype=np.int64).reshape(-1, COLUMNS)

    def clear(self) -> None:
        """Forgets all calls."""
        self.calls.clear()
        self._rows.clear()

    def settle(self) -> None:
        """See :class:`kernels.cpu.jit.NotedCalls`."""
        raise RuntimeError("a result of recorded calls is needed before they have run: replays would lack it")

    @contextmanager
    def noting(self) -> Generator[None]:
        """Adds this thread's kernel calls, which are not made."""
        before, noted.calls = noted.calls, self
        try:
            yield
        finally:
            noted.calls = before


class Batch(CallList):
    """Calls that are made as soon as there are :data:`MOST_CALLS`, or before.

    If this thread keeps helpers awake, one of them makes calls while this thread notes the next ones. Python
    runs slower after a batch, whose data it does not find in the core's caches, so short steps are one batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._are_offered = cpu_threads().are_awake
        self._num_shares = 0

    def note(self, dispatcher: Any, num_items: int, grain: int, args: tuple[Any, ...]) -> None:
        """Adds a call. ``grain`` items take about 100 µs."""
        super().note(dispatcher, num_items, grain, args)
        row = self._rows[-1]
        if self._are_offered:
            cpu_threads().offer(row)
        self._num_shares += row[SHARES]
        number = len(self.calls)
        if number == MOST_CALLS or (number >= LONG_CALLS and self._num_shares >= LONG_SHARES):
            self.settle()

    def clear(self) -> None:
        super().clear()
        self._num_shares = 0

    def settle(self) -> None:
        """Makes all calls."""
        num_made = self._withdraw()
        if num_made < len(self.calls):
            cpu_threads().run(self.table()[num_made:])
        self.clear()

    def drop(self) -> None:
        """Forgets all calls. No thread makes one of them any more."""
        self._withdraw()
        self.clear()

    def _withdraw(self) -> int:
        return cpu_threads().withdraw() if self._are_offered and self.calls else 0


@contextmanager
def batched_calls() -> Generator[Batch]:
    """Runs this thread's kernel calls in batches. All have run at the end."""
    batch = Batch()
    try:
        with batch.noting():
            yield batch
        batch.settle()
    finally:
        batch.drop()
