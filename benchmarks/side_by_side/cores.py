"""Who used the cores during a measurement: the server, the client, or other processes.

Wall time proves nothing on a machine that others use. Each measurement records their share, so that a reader
can tell a trustworthy run from one to repeat.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class CoreTimes:
    """CPU seconds so far."""

    server: float
    client: float
    everybody: float

    @classmethod
    def now(cls, server_pids: Sequence[int]) -> CoreTimes:
        """Returns the CPU time of these processes and all their descendants, of this one, and of the cores
        that it may use."""
        cores = psutil.cpu_times(percpu=True)
        return cls(
            server=sum(map(_tree_s, server_pids)),
            client=sum(os.times()[:2]),
            everybody=sum(_busy_s(cores[core]) for core in os.sched_getaffinity(0)),
        )

    def figures(self, later: CoreTimes, duration_s: float, num_tokens: int) -> dict[str, float]:
        """Returns the average number of busy cores, and the server's CPU time per token of an answer."""
        server, client = later.server - self.server, later.client - self.client
        others = max(0.0, later.everybody - self.everybody - server - client)
        return {
            "server_cores": round(server / duration_s, 2),
            "client_cores": round(client / duration_s, 2),
            "other_cores": round(others / duration_s, 2),
            "server_cpu_ms_per_token": round(server / num_tokens * 1e3, 3),
        }


def _tree_s(pid: int) -> float:
    total = 0.0
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:2])
    return total


def _busy_s(times: object) -> float:
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(float(getattr(times, name, 0.0)) for name in names)
