"""One stage of a call: a process with a time limit.

When a stage is over, every process that it started is gone, and at most ``LOG_BYTES`` and ``TAIL_BYTES`` of
its output are kept: the beginning in the log, the end in the log and in the outcome.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

SKIPPED = 77
"""Exit code of a stage that can't run here, for example because a package is missing. It says so in the last
line of its output."""
UNFINISHED = 75
"""Exit code of a stage that ended in time without having measured all. It goes on when the call is started
again."""
LOG_BYTES = 64 << 10
TAIL_BYTES = 6000
OWN_SHARE = 0.9
"""The part of its time in which a stage should end by itself. The rest is for what it measures last."""
GRACE_S = 5.0
"""Time between SIGINT, at which pytest tells what has failed so far, and SIGKILL."""
KILL_S = 5.0
"""How long a killed process may take to end. One that waits in a driver may never end."""
MARK = "TWINFANG_STAGE"
"""Environment variable by which the processes of a stage are found, whatever session they are in."""


@dataclass(frozen=True)
class Stage:
    """One command."""

    name: str
    purpose: str
    limit_s: float
    arguments: tuple[str, ...]
    """Arguments of this interpreter. ``{seconds}`` stands for the time in which the stage ends by itself."""
    program: tuple[str, ...] = (sys.executable,)
    """The interpreter, perhaps behind a tool that watches it."""
    path: Path | None = None
    """A folder of packages that only this stage sees."""
    missing: str | None = None
    """Why the stage can't run here; None: it can."""

    def command(self, seconds: float) -> list[str]:
        """Returns the command of a stage that will be stopped after ``seconds``."""
        own_s = f"{OWN_SHARE * seconds:.0f}"
        return [*self.program, *(one.replace("{seconds}", own_s) for one in self.arguments)]


@dataclass(frozen=True)
class Outcome:
    """How a stage went."""

    verdict: str
    """``ok``, ``skipped``, ``unfinished``, ``no time left``, ``exit code 3``, ``killed by SIGSEGV`` or
    ``stopped after 90 s``"""
    seconds: float = 0.0
    tail: str = ""
    """The end of the output."""

    @property
    def is_failure(self) -> bool:
        return self.verdict not in ("ok", "skipped", "unfinished")


def run(stage: Stage, limit_s: float, log: IO[bytes]) -> Outcome:
    """Runs a stage for ``limit_s`` seconds at most."""
    log.write(f"\n==== {stage.name}: {' '.join(stage.command(limit_s))}\n".encode())
    log.flush()
    if stage.missing is not None:
        return Outcome("skipped", tail=stage.missing)
    began = time.monotonic()
    mark = uuid.uuid4().hex
    paths = filter(None, [str(stage.path or ""), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        stage.command(limit_s),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    output = _Output(process, log)
    try:
        verdict = _verdict(process.wait(limit_s))
    except subprocess.TimeoutExpired:
        verdict = f"stopped after {limit_s:.0f} s"
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:
        _end_all(process, mark)
        tail = output.close()
    return Outcome(verdict, time.monotonic() - began, tail)


def _verdict(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return {0: "ok", SKIPPED: "skipped", UNFINISHED: "unfinished"}.get(code, f"exit code {code}")


def _end_all(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kills the stage's processes: its own session at once, and all others that inherited the mark.

    The kill of the session also finds a child that is about to run another program and has no environment to
    read at that moment.
    """
    give_up = time.monotonic() + KILL_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    while (pids := [process.pid] * (process.poll() is None) + list(_marked(mark))) and (
        time.monotonic() < give_up
    ):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _marked(mark: str) -> Iterator[int]:
    entry = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


class _Output:
    """Reads a process's output on a thread of its own, so that the process never waits for a reader."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        assert process.stdout is not None
        self._pipe = process.stdout
        self._log = log
        self._tail = bytearray()
        self._num_bytes = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while chunk := os.read(self._pipe.fileno(), 1 << 16):
            room = max(0, LOG_BYTES - self._num_bytes)
            self._log.write(chunk[:room])
            self._log.flush()
            self._num_bytes += len(chunk)
            self._tail += chunk
            del self._tail[:-TAIL_BYTES]

    def close(self) -> str:
        """Returns the end of the output. Waits only briefly for its last bytes: a process that could not be
        killed would keep the pipe open."""
        self._thread.join(KILL_S)
        num_left_out = self._num_bytes - LOG_BYTES - len(self._tail)
        if self._num_bytes > LOG_BYTES:
            self._log.write(f"\n… {max(0, num_left_out)} bytes left out …\n".encode() + self._tail)
        if not self._thread.is_alive():
            self._pipe.close()
        return self._tail.decode(errors="replace")
