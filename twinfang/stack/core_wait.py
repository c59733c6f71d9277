"""Measures how long a process could not run because it waited for a core."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
NANOSECONDS = 1e-9


class CoreWait:
    """Watches one process and its children. If the system does not report waits, they count as 0."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._waited_s = _waited_s(pid)

    def since_last_s(self) -> float:
        """Returns how many seconds the longest-waiting thread has waited since the last call.

        Threads wait for cores at the same time, so the sum over all threads could exceed the time that has
        passed.
        """
        before, self._waited_s = self._waited_s, _waited_s(self._pid)
        return max((now - before.get(tid, 0.0) for tid, now in self._waited_s.items()), default=0.0)


def _waited_s(pid: int) -> dict[int, float]:
    """Returns, by thread, the seconds in which it could run but no core was free (kernel docs,
    scheduler/sched-stats)."""
    waited = {}
    for tid in _threads(pid):
        with contextlib.suppress(OSError, IndexError):  # the thread has ended, or the kernel counts no waits
            waited[tid] = int((PROC / f"{tid}/schedstat").read_text().split()[1]) * NANOSECONDS
    return waited


def _threads(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for name in os.listdir(PROC / f"{pid}/task"):
            yield int(name)
            for child in (PROC / f"{pid}/task/{name}/children").read_text().split():
                yield from _threads(int(child))
