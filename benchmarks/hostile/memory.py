"""Resident memory of a stack's processes: before an attack, its peak, and a while after."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from twinfang.launch import LaunchedStack

INTERVAL_S = 0.25
MIB = 2**20


class Memory:
    """Of router, prefill and decode servers, by name, in MiB."""

    def __init__(self, stack: LaunchedStack) -> None:
        self._stack = stack
        self._peak: dict[str, float] = {}

    def now(self) -> dict[str, float]:
        found = {}
        for name, process in self._stack.processes().items():
            with suppress(psutil.NoSuchProcess):
                found[name] = round(psutil.Process(process.pid).memory_info().rss / MIB, 1)
        return found

    @property
    def peak(self) -> dict[str, float]:
        return self._peak

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block the peak is followed. Must be entered on the event loop."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()

    async def _watch(self) -> None:
        while True:
            for name, size in self.now().items():
                self._peak[name] = max(size, self._peak.get(name, 0.0))
            await asyncio.sleep(INTERVAL_S)
