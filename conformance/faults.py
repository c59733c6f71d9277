"""Faults of processes: frozen, thawed, killed. A frozen server is also how a case delays what it does."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

from conformance.pair import Role, RunningPair
from testing.conditions import wait_until

STRUCK_S = 60.0
"""Time within which a signal has its effect. Each thread of a killed process needs a core to end, and memory
takes a while to be given back. On two cores with a load of 50 that took longer than 15 s."""
FACTS = ("State", "Threads", "PPid", "TracerPid", "VmRSS", "Cpus_allowed_list")
"""What an error tells of a process, as Linux names it in ``/proc/PID/status``."""


def tree(pid: int) -> list[int]:
    """Returns a process and all its descendants. If it leads a session, whatever it has left behind there
    belongs to it, too, even after its end."""
    members = [one for one in psutil.pids() if _session(one) == pid]
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        members += [pid, *(child.pid for child in process.children(recursive=True))]
    return list(dict.fromkeys(members))


@contextlib.contextmanager
def frozen(pair: RunningPair, role: Role) -> Iterator[None]:
    """The server stands still inside the block. Raises :class:`ProcessLookupError` if it has ended."""
    processes: list[psutil.Process] = []
    try:
        _freeze(pair, role, processes)
        if all(map(has_ended, processes)):
            raise ProcessLookupError(f"the {role} server can't be frozen: it has no process any more")
        yield
    finally:
        for process in reversed(processes):
            _signal(process, signal.SIGCONT)


def kill(pair: RunningPair, role: Role) -> None:
    """Kills the server. Returns once all its processes have ended."""
    processes: list[psutil.Process] = []
    _freeze(pair, role, processes)
    for process in processes:
        _unpin(process)
        _signal(process, signal.SIGKILL)
    _wait(has_ended, processes, f"the {role} server has ended")


def _unpin(process: psutil.Process) -> None:
    """Lets the process end on any core. Pinned to a core on which another server's threads spin, a killed
    process has waited for more than a minute to be run once more."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, range(os.cpu_count() or 1))


def _freeze(pair: RunningPair, role: Role, frozen: list[psutil.Process]) -> None:
    """Stops the server's processes and appends them to ``frozen``. Looks again until none of them has started
    another one in the meantime."""
    while found := [one for one in _processes(pair.pids(role)) if one not in frozen]:
        frozen += found
        for process in found:
            _signal(process, signal.SIGSTOP)
        _wait(_stands, found, f"the {role} server is frozen")


def _processes(pids: Iterable[int]) -> Iterator[psutil.Process]:
    """Yields processes that know when they were started, so that a later one with the same id is another."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def _wait(is_so: Callable[[psutil.Process], bool], processes: list[psutil.Process], what: str) -> None:
    """Waits until it is so of all. The error names the others, with what the kernel says of them."""
    left = list(processes)

    def is_so_of_all() -> bool:
        left[:] = [process for process in left if not is_so(process)]
        return not left

    try:
        wait_until(is_so_of_all, what, STRUCK_S)
    except AssertionError as error:
        raise AssertionError(f"{error}; not so of {'; '.join(map(_described, left))}") from None


def _described(process: psutil.Process) -> str:
    folder = Path(f"/proc/{process.pid}")
    try:
        pairs = (line.partition(":") for line in (folder / "status").read_text().splitlines())
        facts = {name: " ".join(value.split()) for name, _, value in pairs}
        waits_in = (folder / "wchan").read_text()
        ran_s, waited_s = (int(one) / 1e9 for one in (folder / "schedstat").read_text().split()[:2])
    except OSError:
        return f"process {process.pid}, which has just gone"
    told = ", ".join(f"{name} {facts[name]}" for name in FACTS if name in facts)
    times = f"ran {ran_s:.1f} s, waited {waited_s:.1f} s for a core"
    return f"process {process.pid} ({facts['Name']}: {told}, wchan {waits_in}, {times})"


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _signal(process: psutil.Process, signum: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signum)


def _stands(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_STOPPED or has_ended(process)
    return True


def has_ended(process: psutil.Process) -> bool:
    """Whether nothing of the process runs. A zombie may have threads that still run, and hold its memory and
    its ports."""
    try:
        if not process.is_running():
            return True
        is_zombie = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return is_zombie and process.num_threads() <= 1
    except psutil.NoSuchProcess:
        return True


def lives(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    return not all(map(has_ended, _processes([pid])))
