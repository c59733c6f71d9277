"""The fork server that ``up`` and ``serve`` start before they read their flags."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from testing.conditions import TIMEOUT_S, wait_until
from twinfang.early_fork_server import FORK_SERVER, end_early, needs_fork_server, start_early, take_early
from twinfang.stack.cores import may_use_gpu

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open") or may_use_gpu("auto"), reason="nothing is forked here"
)


@pytest.mark.parametrize("line", ["up", "serve --port 0", "up --model DIR"])
def test_a_stack_needs_it(line: str):
    assert needs_fork_server(line.split(), {"HOME": "/root"})


@pytest.mark.parametrize(
    "line", ["", "--version", "decode", "up --help", "up --device=cuda", "up --device cpu", "serve --tls"]
)
def test_a_command_that_may_not_need_it_reads_its_flags_first(line: str):
    assert not needs_fork_server(line.split(), {})


@pytest.mark.parametrize("name", ["TWINFANG_DEVICE", "TWINFANG_TLS"])
def test_a_variable_may_decide_too(name: str):
    assert not needs_fork_server(["up"], {name: "1"})


def test_a_process_that_nobody_takes_is_ended(monkeypatch: pytest.MonkeyPatch):
    for name in ("TWINFANG_DEVICE", "TWINFANG_TLS"):
        monkeypatch.delenv(name, raising=False)
    before = set(psutil.Process().children())
    start_early(["up"])
    (process,) = set(psutil.Process().children()) - before
    wait_until(lambda: FORK_SERVER in process.cmdline())
    end_early()
    assert not process.is_running()
    assert take_early() is None


def test_a_wrong_flag_leaves_no_process_behind():
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as errors:
        with os.fdopen(writer, "wb") as stderr:
            command = [sys.executable, "-m", "twinfang", "up", "--no-such-flag"]
            ran = subprocess.run(command, stderr=stderr, timeout=TIMEOUT_S, check=False)
        os.set_blocking(reader, False)  # no end of file is there if a process still holds the other end
        assert errors.read() == (
            b"twinfang up: error: unrecognized arguments: --no-such-flag; see twinfang up --help\n"
        )
        assert errors.read() == b""
    assert ran.returncode == 2
