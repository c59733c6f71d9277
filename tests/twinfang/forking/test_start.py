"""How tests start stacks, servers and routers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from testing.conditions import TIMEOUT_S
from testing.fleets.stack import running_stack
from testing.forking import child, preloaded_server
from testing.forking.forked_process import ForkedProcess
from testing.forking.start import start_process
from twinfang.fork_server import IMPORTED
from twinfang.stack.cores import may_use_gpu

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open") or may_use_gpu("auto"), reason="nothing is forked here"
)


@pytest.fixture
def start(tmp_path):
    """Starts :mod:`testing.forking.child`; returns the process and what it has seen."""
    running = []

    def start(*arguments, **settings):
        reader, writer = os.pipe()
        with (tmp_path / "log").open("wb") as log:
            environment = {"ONLY": "this"}
            process = start_process(
                child.__name__, arguments, log=log, environment=environment, fds={"--fd": writer}, **settings
            )
        running.append(process)
        os.close(writer)
        with os.fdopen(reader) as answer:
            return process, answer.read()

    yield start
    for process in running:
        process.kill()
        process.wait(TIMEOUT_S)


@pytest.mark.parametrize("prefix", [(), ("env",)], ids=["forked", "started"])
@pytest.mark.parametrize("own_group", [False, True])
def test_both_kinds_of_processes_are_the_same_to_a_test(start, prefix, own_group):
    process, seen = start("exit", prefix=prefix, own_group=own_group)
    assert isinstance(process, ForkedProcess) == (not prefix)
    assert f'"parent": {os.getpid()}, "group": {process.pid if own_group else os.getpgid(0)}' in seen
    assert '"ONLY": "this"' in seen
    assert process.wait(TIMEOUT_S) == process.poll() == 7
    process.send_signal(signal.SIGTERM)  # it has ended: nothing happens


@pytest.mark.parametrize(("flags", "kind"), [([], ForkedProcess), (["--tls"], subprocess.Popen)])
def test_its_log_has_what_it_says(tmp_path, flags, kind):
    """gRPC reads how to use TLS when it is imported, so a process with TLS imports it itself."""
    with (tmp_path / "log").open("wb") as log:
        process = start_process("twinfang", ["up", *flags, "--no-such-flag"], log=log, environment={})
    assert isinstance(process, kind)
    assert process.wait(TIMEOUT_S) == 2
    assert "unrecognized arguments: --no-such-flag" in (tmp_path / "log").read_text()


def test_threads_may_start_processes_at_once(start):
    with ThreadPoolExecutor(4) as pool:
        started = [process for process, _ in pool.map(lambda _: start("exit"), range(12))]
    assert [process.wait(TIMEOUT_S) for process in started] == [7] * 12


def test_waiting_has_a_deadline_and_a_signal_ends_it(start):
    process, _ = start("stay")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.terminate()
    assert process.wait(TIMEOUT_S) == -signal.SIGTERM


def test_ps_shows_the_command_line(start):
    process, _ = start("stay")
    assert psutil.Process(process.pid).cmdline()[:4] == [sys.executable, "-m", child.__name__, "stay"]


def test_a_stack_is_forked():
    assert set(IMPORTED) <= set(preloaded_server.IMPORTED)
    with running_stack("serve") as stack:
        assert isinstance(stack.supervisor, ForkedProcess)
