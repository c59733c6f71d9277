"""Faults of processes: frozen, thawed, killed. A frozen server is also how a case delays what it does."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import psutil

from conformance.pair import Role, RunningPair
from testing.conditions import wait_until


def tree(pid: int) -> list[int]:
    """Returns a process and all its descendants, or nothing if it has ended."""
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


@contextlib.contextmanager
def frozen(pair: RunningPair, role: Role) -> Iterator[None]:
    """The server stands still inside the block."""
    pids = list(pair.pids(role))
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: all(map(_stands, pids)), f"the {role} server is frozen")
        yield
    finally:
        for pid in reversed(pids):
            _signal(pid, signal.SIGCONT)


def kill(pair: RunningPair, role: Role) -> None:
    """Kills the server. Returns once all its processes have ended."""
    pids = list(pair.pids(role))
    for pid in pids:
        _signal(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(lives, pids)), f"the {role} server has ended")


def _signal(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _stands(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def lives(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
