"""The supervisor over small real processes: ``twinfang`` commands that end at once or do nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from testing.conditions import until
from twinfang.stack.child import Child, ChildSpec
from twinfang.stack.core_wait import CoreWait
from twinfang.stack.ports import free_ports
from twinfang.stack.restart_policy import RestartLimits
from twinfang.stack.supervisor import ChildFailedError, Supervisor

TIMEOUT_S = 60.0
LIMITS = RestartLimits(max_restarts=2, first_delay_s=0.01)
IDLE_ROUTER = ("router", "--decode", "127.0.0.1:1", "--port", "0")
"""Runs until it is stopped; the server it is told of is never there."""


async def never() -> None:
    await asyncio.Event().wait()


async def at_once() -> None:
    await asyncio.sleep(0)


def spec(name: str, *arguments: str, until_ready=never, stop_grace_s: float = 20.0) -> ChildSpec:
    return ChildSpec(name, arguments, "", until_ready, stop_grace_s)


def listening_router(stop_grace_s: float = 20.0) -> ChildSpec:
    """A router that is ready once it listens: by then it has its handler of SIGTERM."""
    port = free_ports(1)[0]

    async def until_listening() -> None:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return

    arguments = ("router", "--decode", "127.0.0.1:1", "--port", str(port))
    return spec("frozen", *arguments, until_ready=until_listening, stop_grace_s=stop_grace_s)


def supervisor(*groups: list[ChildSpec], start_timeout_s: float = TIMEOUT_S, on_change=None) -> Supervisor:
    return Supervisor(
        groups,
        environment=os.environ,
        start_timeout_s=start_timeout_s,
        limits=LIMITS,
        on_change=on_change or (lambda child: None),
    )


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


async def test_a_child_that_dies_is_restarted_up_to_its_limit(caplog):
    dies = supervisor([spec("short", "--version")])
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(ChildFailedError, match=r"short died again \(exit code 0\)"),
    ):
        await dies.run()
    assert dies.children[0].num_restarts == 2
    lines = [record.getMessage() for record in caplog.records if "child died" in record.getMessage()]
    assert len(lines) == 2
    assert re.search(r"name=short exit=exit code 0 restarts=2", lines[1])


async def test_a_child_that_refuses_its_command_line_is_not_restarted_and_all_are_stopped():
    refused = supervisor([spec("idle", *IDLE_ROUTER), spec("refused", "router")])
    with pytest.raises(ChildFailedError, match=r"refused could not start \(exit code 2\)"):
        await refused.run()
    assert refused.children[1].num_restarts == 0


async def test_a_child_that_does_not_become_ready_is_killed(caplog):
    late = supervisor([spec("late", *IDLE_ROUTER)], start_timeout_s=0.2)
    with pytest.raises(ChildFailedError, match=r"late died again \(SIGKILL\)"):
        await late.run()
    assert "late was not ready within 0.2 s" in caplog.text


async def test_groups_start_in_order_and_stop_in_reverse():
    events: list[str] = []
    servers = [spec(name, *IDLE_ROUTER, until_ready=at_once) for name in ("a", "b")]
    router = spec("c", *IDLE_ROUTER, until_ready=at_once)

    def on_change(child: Child) -> None:
        events.append(child.name)
        if stack.is_ready:
            stack.request_stop()

    stack = supervisor(servers, [router], on_change=on_change)
    await asyncio.wait_for(stack.run(), TIMEOUT_S)
    assert set(events[:2]) == {"a", "b"}
    assert events[2] == "c"


async def test_a_group_is_prepared_at_once_and_waits_for_its_turn():
    first_may_be_ready = asyncio.Event()
    first = spec("first", *IDLE_ROUTER, until_ready=first_may_be_ready.wait)
    second = listening_router()
    two = supervisor([first], [second])
    running = asyncio.create_task(two.run())
    _, waiting = two.children
    await until(lambda: waiting.pid is not None and _reads_its_turn(waiting.pid))
    assert not waiting.is_ready
    first_may_be_ready.set()
    await asyncio.wait_for(waiting.first_ready.wait(), TIMEOUT_S)
    two.request_stop()
    await running


def _reads_its_turn(pid: int) -> bool:
    """Whether the process's main thread waits at the pipe, with all modules imported."""
    call = Path(f"/proc/{pid}/syscall").read_text().split()  # number and arguments; or "running"
    arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return len(call) > 2 and call[1:2] == [hex(int(arguments[arguments.index("--turn") + 1]))]


async def test_one_that_dies_before_its_turn_stops_the_stack():
    wrong = spec("wrong", "router", "--no-such-flag")
    with pytest.raises(ChildFailedError, match=r"wrong could not start \(exit code 2\)"):
        await supervisor([spec("first", *IDLE_ROUTER)], [wrong]).run()


async def test_a_second_request_to_stop_kills_what_does_not_stop():
    def on_change(child: Child) -> None:
        if child.is_ready and child.pid is not None:
            os.kill(child.pid, signal.SIGSTOP)
            stack.request_stop()
            asyncio.get_running_loop().call_later(0.1, stack.request_stop)

    stack = supervisor([listening_router(stop_grace_s=10 * TIMEOUT_S)], on_change=on_change)
    await asyncio.wait_for(stack.run(), TIMEOUT_S)


async def test_a_child_that_does_not_stop_in_time_is_killed(caplog):
    def on_change(child: Child) -> None:
        if child.is_ready and child.pid is not None:
            os.kill(child.pid, signal.SIGSTOP)
            stack.request_stop()

    stack = supervisor([listening_router(stop_grace_s=0.2)], on_change=on_change)
    await asyncio.wait_for(stack.run(), TIMEOUT_S)
    assert "frozen did not stop in time" in caplog.text


@contextmanager
def starved(pid: int) -> Iterator[None]:
    """Inside the block a process gets a core only where a busy one leaves it: next to never."""
    cores = os.sched_getaffinity(0)
    core = min(cores)
    threads = [thread.id for thread in psutil.Process(pid).threads()]
    for thread in threads:
        os.sched_setaffinity(thread, {core})
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(busy.pid, {core})
    try:
        yield
    finally:
        busy.kill()
        busy.wait(TIMEOUT_S)
        for thread in threads:
            with suppress(ProcessLookupError):
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                os.sched_setaffinity(thread, cores)


async def test_a_child_that_waits_for_a_core_is_given_the_time(caplog):
    grace_s = 2.0  # the router needs a sixth of it on an idle machine

    async def starve(pid: int) -> None:
        waited, waited_s = CoreWait(pid), 0.0
        with starved(pid):
            stack.request_stop()
            while waited_s < 1.5 * grace_s and psutil.pid_exists(pid):
                await asyncio.sleep(0.02)
                waited_s += waited.since_last_s()

    def on_change(child: Child) -> None:
        if child.is_ready and child.pid is not None:
            tasks.append(asyncio.create_task(starve(child.pid)))

    tasks: list[asyncio.Task[None]] = []
    stack = supervisor([listening_router(stop_grace_s=grace_s)], on_change=on_change)
    await asyncio.wait_for(stack.run(), TIMEOUT_S)
    await asyncio.gather(*tasks)
    assert "did not stop in time" not in caplog.text


async def test_a_child_that_ends_with_a_fault_when_it_is_stopped_is_named(caplog):
    async def fail_once_told(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:  # until then an abort would overtake it
            await asyncio.sleep(0.02)
        os.kill(pid, signal.SIGABRT)  # this and what comes next wait, the abort first
        stack.request_stop()
        while not is_pending(pid, signal.SIGTERM):
            await asyncio.sleep(0.02)
        os.kill(pid, signal.SIGCONT)

    def on_change(child: Child) -> None:
        if child.is_ready and child.pid is not None:
            tasks.append(asyncio.create_task(fail_once_told(child.pid)))

    tasks: list[asyncio.Task[None]] = []
    stack = supervisor([listening_router()], on_change=on_change)
    await asyncio.wait_for(stack.run(), TIMEOUT_S)
    assert "frozen was told to stop and ended with SIGABRT" in caplog.text


def is_pending(pid: int, signum: signal.Signals) -> bool:
    (line,) = re.findall(r"^ShdPnd:\s+(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return bool(int(line, 16) & 1 << (signum - 1))
