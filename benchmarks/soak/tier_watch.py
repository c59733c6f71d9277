"""What servers with tiers have counted, and what they hold: descriptors and memory."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from testing.fleets.fleet import Fleet, Process

INTERVAL_S = 1.0
"""Between two looks. What a server counts after the last one before its death is not seen."""
TIMEOUT_S = 2.0
MOST_MORE_BYTES = 64 << 20
"""By which a process may grow from one pause to the last one of its life."""
MOST_MORE_DESCRIPTORS = 32
_COUNTER = re.compile(
    r"^twinfang_((?:host|file)_cache_\w+_total)(?:\{kind=\"(\w+)\"\})? (\S+)$", re.MULTILINE
)

Life = tuple[str, int]
"""A process's name and pid."""


class TierWatch:
    """Looks at the metrics of these servers in a thread of its own, and at all processes when asked."""

    def __init__(self, fleet: Fleet, names: Sequence[str]) -> None:
        self._servers = [fleet.servers[name] for name in names]
        self._processes = fleet.processes
        self._counted: dict[Life, Counter[str]] = {}
        self._first: dict[Life, tuple[int, int]] = {}
        """Bytes and descriptors of each life in its first pause."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def counted(self) -> Counter[str]:
        """Returns the sums of all lives of all servers."""
        return sum(self._counted.values(), Counter[str]())

    def grown(self) -> dict[str, dict[str, int]]:
        """Returns what processes hold beyond their first pause, by process, where it is too much.

        Call it in a pause: then no request holds anything.
        """
        found: dict[str, dict[str, int]] = {}
        for process in self._processes:
            if not process.is_alive:
                continue
            assert process.handle is not None
            one = psutil.Process(process.handle.pid)
            num_bytes, num_fds = one.memory_info().rss, one.num_fds()
            first_bytes, first_fds = self._first.setdefault((process.name, one.pid), (num_bytes, num_fds))
            more = {"descriptors": num_fds - first_fds, "MiB": (num_bytes - first_bytes) >> 20}
            if more["descriptors"] > MOST_MORE_DESCRIPTORS or num_bytes - first_bytes > MOST_MORE_BYTES:
                found[process.name] = more
        return found

    def _watch(self) -> None:
        with httpx.Client(timeout=TIMEOUT_S) as client:
            while not self._ended.wait(INTERVAL_S):
                for server in self._servers:
                    with suppress(httpx.HTTPError):
                        self._look(client, server)

    def _look(self, client: httpx.Client, server: Process) -> None:
        if server.handle is None or not server.is_alive:
            return
        pid = server.handle.pid
        page = client.get(f"http://127.0.0.1:{server.metrics_port}/metrics").text
        found = Counter[str]()
        for name, kind, value in _COUNTER.findall(page):
            found[" ".join(filter(None, (name, kind)))] += int(float(value))
        if found:
            self._counted[server.name, pid] = found


def deleted_segments(process: Process) -> int:
    """Returns the number of deleted segments that a server still has open."""
    assert process.handle is not None
    count = 0
    with suppress(OSError):
        for fd in Path(f"/proc/{process.handle.pid}/fd").iterdir():
            with suppress(OSError):
                target = os.readlink(fd)
                count += ".segment" in target and target.endswith("(deleted)")
    return count
