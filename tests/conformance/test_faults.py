"""Processes that are frozen and killed, whatever they do meanwhile."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import psutil
import pytest

from conformance import faults
from conformance.faults import frozen, has_ended, kill, lives, tree
from testing.conditions import wait_until

FOREVER = "import signal; signal.pause()"
LEAVES_A_CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {FOREVER!r}])"
"""Ends. Its child goes on, and is a descendant of nobody that the hook knows."""
ENDS_BUT_FOR_A_THREAD = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).syscall(60, 0)  # ends this thread alone
"""


@dataclass
class Pair:
    """As much of a pair as is struck."""

    pid: int

    def pids(self, role):
        return tree(self.pid)


@pytest.fixture
def started():
    ours = []

    def start(program):
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, start_new_session=True
        )
        ours.append(process)
        return process

    yield start
    for process in ours:
        for pid in tree(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_a_server_is_killed_with_all_that_its_leader_has_left_behind(started):
    leader = started(LEAVES_A_CHILD)
    leader.wait()
    (child,) = tree(leader.pid)
    assert child != leader.pid
    with frozen(Pair(leader.pid), "prefill"):
        assert psutil.Process(child).status() == psutil.STATUS_STOPPED
    kill(Pair(leader.pid), "prefill")
    assert not lives(child)


def test_a_process_has_ended_when_its_last_thread_has(started):
    process = started(ENDS_BUT_FOR_A_THREAD)
    known = psutil.Process(process.pid)
    wait_until(lambda: known.status() == psutil.STATUS_ZOMBIE)
    assert not has_ended(known)
    process.stdin.close()
    wait_until(lambda: has_ended(known))


def test_what_does_not_end_is_named_with_its_state(started, monkeypatch):
    process = started(FOREVER)
    monkeypatch.setattr(faults, "STRUCK_S", 0.1)
    monkeypatch.setattr(faults, "has_ended", lambda _: False)
    with pytest.raises(AssertionError) as raised:
        kill(Pair(process.pid), "prefill")
    said = str(raised.value)
    assert "not within 0.1 s: the prefill server has ended; not so of process" in said
    assert f"process {process.pid} (" in said
    assert f"PPid {os.getpid()}" in said
    assert "s for a core)" in said


def test_a_server_that_has_ended_is_not_said_to_be_frozen(started):
    process = started("")
    process.wait()
    with (
        pytest.raises(ProcessLookupError, match="the decode server can't be frozen"),
        frozen(Pair(process.pid), "decode"),
    ):
        pass
