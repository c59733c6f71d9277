"""Memory of a stack's processes: before an attack, its peak, and a while after.

Resident memory, including child processes, minus the servers' caches. Caches are reserved at the start
(``--cache-memory``), and their pages become resident at first use: any client's prompts make them grow, up to
the reserved size.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from twinfang.launch import LaunchedStack

INTERVAL_S = 0.5
MIB = 2**20
CACHE_BYTES = 128 * MIB
"""An anonymous mapping of at least this size in a newly started process is a cache."""
PRESENT_BIT = 63
"""The bit of an entry of /proc/PID/pagemap."""


@dataclass(frozen=True)
class Caches:
    """Address ranges of a process's caches."""

    pid: int
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, pid: int) -> Caches:
        found = []
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
            addresses, permissions, _, _, _, *name = line.split()
            first, last = (int(address, 16) for address in addresses.split("-"))
            if permissions.startswith("rw") and not name and last - first >= CACHE_BYTES:
                found.append((first, last))
        return cls(pid, tuple(found))

    @property
    def resident_bytes(self) -> int:
        entry_bytes, pages = 8, 0
        with Path(f"/proc/{self.pid}/pagemap").open("rb", buffering=0) as file:
            for first, last in self.ranges:
                file.seek(first // mmap.PAGESIZE * entry_bytes)
                entries = np.frombuffer(
                    file.read((last - first) // mmap.PAGESIZE * entry_bytes), dtype=np.uint64
                )
                pages += int(np.count_nonzero(entries >> np.uint64(PRESENT_BIT)))
        return pages * mmap.PAGESIZE


class Memory:
    """Memory of router, prefill and decode servers, by name, in MiB. Create it while the stack is fresh."""

    def __init__(self, stack: LaunchedStack) -> None:
        self._stack = stack
        self._caches = {process.pid: Caches.of(process.pid) for process in stack.processes().values()}
        self.peak: dict[str, float] = {}

    def now(self) -> dict[str, float]:
        """Returns the memory now. That of a restarted process includes its caches."""
        found = {}
        for name, process in self._stack.processes().items():
            with suppress(psutil.NoSuchProcess, FileNotFoundError):
                parent, caches = psutil.Process(process.pid), self._caches.get(process.pid)
                size = sum(one.memory_info().rss for one in (parent, *parent.children(recursive=True)))
                size -= 0 if caches is None else caches.resident_bytes
                found[name] = round(size / MIB, 1)
        return found

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Tracks the peak inside the block. Must be entered on the event loop."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()

    async def _watch(self) -> None:
        while True:
            for name, size in (await asyncio.to_thread(self.now)).items():
                self.peak[name] = max(size, self.peak.get(name, 0.0))
            await asyncio.sleep(INTERVAL_S)
