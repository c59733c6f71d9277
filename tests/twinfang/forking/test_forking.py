"""Processes that a fork server starts, and what happens if it can't."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator

import psutil
import pytest

from testing.forking import child, small_server
from twinfang.forking.adopted import AdoptedProcess
from twinfang.forking.client import ForkError, ForkServer

TIMEOUT_S = 60.0

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="forked processes need Linux to adopt")


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def server(task: str = "", num_forks: int = 1, timeout_s: float = TIMEOUT_S) -> ForkServer:
    found = ForkServer.start(small_server.__name__)
    assert found is not None
    found.prepare(task, num_forks=num_forks, timeout_s=timeout_s)
    return found


async def forked(forks: ForkServer, what: str) -> tuple[AdoptedProcess, dict[str, object]]:
    """Forks a child, and returns what it has seen."""
    reader, writer = os.pipe()
    try:
        process = await forks.fork(child.__name__, [what], {"--fd": writer}, {"ONLY": "this"})
    finally:
        os.close(writer)
    with os.fdopen(reader) as answer:
        return process, json.loads(await asyncio.to_thread(answer.read))


async def test_a_forked_process_is_a_child_with_its_own_group_environment_and_exit_code():
    process, seen = await forked(server(), "exit")
    assert seen == {
        "parent": os.getpid(),
        "group": process.pid,
        "environment": {"ONLY": "this"},
        "main": child.__name__,
    }
    assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 7
    with pytest.raises(ProcessLookupError):
        process.send_signal(signal.SIGTERM)


async def test_ps_shows_its_own_command_line_and_a_signal_ends_it():
    process, _ = await forked(server(), "stay")
    words = psutil.Process(process.pid).cmdline()
    assert words[:5] == [sys.executable, "-m", child.__name__, "stay", "--fd"]
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == -signal.SIGTERM


async def test_several_forks_at_once_then_the_fork_server_is_gone():
    forks = server(num_forks=3)
    found = await asyncio.gather(*(forked(forks, "exit") for _ in range(3)))
    assert len({process.pid for process, _ in found}) == 3
    assert [await process.wait() for process, _ in found] == [7, 7, 7]
    with pytest.raises(ForkError):
        await forked(forks, "exit")


@pytest.mark.parametrize(
    ("task", "timeout_s", "reason"),
    [
        ("thread", TIMEOUT_S, "it has 2 threads"),
        ("end", TIMEOUT_S, "it has ended|Broken pipe|reset by peer"),
        ("wait", 0.2, "not ready within 0.2 s"),
    ],
)
async def test_a_fork_server_that_can_not_fork_says_why(task: str, timeout_s: float, reason: str):
    with pytest.raises(ForkError, match=reason):
        await forked(server(task, timeout_s=timeout_s), "exit")


async def test_a_cancelled_fork_leaves_no_process():
    forks = server()
    waiting = asyncio.ensure_future(forked(forks, "stay"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    forks.close()


def test_a_fork_server_that_nobody_uses_ends_at_once():
    server("wait").close()
