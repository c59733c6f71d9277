"""What a fleet looks like when a wait has taken too long: what each process does, and what its log said
last."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress

import httpx
import psutil

from testing.fleets.fleet import Fleet, Process

LOG_LINES = 25
STACKS_TIMEOUT_S = 30.0


def evidence(fleet: Fleet) -> Iterator[str]:
    """Yields lines about each process. Stacks are among them if py-spy is installed."""
    yield f"load averages {os.getloadavg()}, {psutil.cpu_times_percent(interval=1.0)}"
    for process in fleet.processes:
        yield f"--- {process.name} at {process.address}"
        if not process.is_alive:
            yield f"ended: {process.handle and process.handle.returncode}"
        else:
            assert process.handle is not None
            one = psutil.Process(process.handle.pid)
            yield f"pid {one.pid}, {one.status()}, {one.num_threads()} threads, {one.cpu_times()}"
            yield from _stacks(one.pid)
        if process.name in fleet.routers:
            yield from _view(fleet, process)
        yield from process.log.splitlines()[-LOG_LINES:]


def _view(fleet: Fleet, router: Process) -> Iterator[str]:
    """Yields how a router sees its servers."""
    try:
        for name, value in fleet.metrics(router.name).items():
            if name.startswith(("twinfang_servers_connected", "twinfang_circuit_breaker_state")) and value:
                yield f"{name} {value:g}"
    except httpx.HTTPError as error:
        yield f"it does not answer: {error!r}"


def _stacks(pid: int) -> Iterator[str]:
    if (py_spy := shutil.which("py-spy")) is not None:
        command = [py_spy, "dump", "--pid", str(pid)]
        with suppress(subprocess.TimeoutExpired):
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=STACKS_TIMEOUT_S, check=False
            )
            yield from (result.stdout or result.stderr).splitlines()
