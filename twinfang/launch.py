"""Starts a stack from Python in a separate process: ``twinfang up`` or ``twinfang serve`` on a free port.

with tempfile.TemporaryDirectory() as folder:
    stack = launch(Path(folder), "up", "--decode", "2")
    try:
        stack.wait_until_ready(timeout_s=120)
        ...  # stack.url
    finally:
        stack.stop(timeout_s=40)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from wire.errors import DeadlineError, UnavailableError

POLL_INTERVAL_S = 0.05
LOG_TAIL_LINES = 60


@dataclass(frozen=True)
class StackProcess:
    """One process of a stack, as the status file describes it."""

    name: str
    """For example prefill-0, decode-0, both-0 or router."""
    address: str
    pid: int
    restarts: int
    metrics_url: str | None
    """None if its metrics page is switched off."""


class RunningProcess(Protocol):
    """What :class:`subprocess.Popen` offers, as far as it is needed here."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


@dataclass(frozen=True)
class LaunchedStack:
    """A stack that :func:`launch` has started."""

    supervisor: RunningProcess
    folder: Path
    """The folder of the stack's log and status file."""

    @property
    def log(self) -> str:
        """All that the supervisor and its children have written to stdout and stderr so far."""
        return log_path(self.folder).read_text(encoding="utf-8", errors="replace")

    @property
    def log_tail(self) -> str:
        return "\n".join(self.log.splitlines()[-LOG_TAIL_LINES:])

    @property
    def url(self) -> str:
        return str(self.status()["url"])

    @property
    def model(self) -> str:
        """The model's name for clients."""
        return str(self.status()["model"])

    def status(self) -> dict[str, Any]:
        """The content of the status file; empty until the stack is ready for the first time."""
        try:
            text = _status_path(self.folder).read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        status: dict[str, Any] = json.loads(text)
        return status

    def processes(self) -> dict[str, StackProcess]:
        """The running children, by name."""
        return {
            p["name"]: StackProcess(p["name"], p["address"], p["pid"], p["restarts"], p["metrics_url"])
            for p in self.status().get("processes", [])
            if p["pid"] is not None
        }

    def wait_until_ready(self, timeout_s: float) -> None:
        """Waits until the stack is ready. Raises :class:`UnavailableError` if the stack ends before, and
        :class:`DeadlineError` if it is not ready within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while not self.status().get("ready"):
            if self.supervisor.poll() is not None:
                code = self.supervisor.returncode
                raise UnavailableError(f"the stack ended with code {code}; its log:\n{self.log_tail}")
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the stack was not ready within {timeout_s:g} s; its log:\n{self.log_tail}"
                )
            time.sleep(POLL_INTERVAL_S)

    def stop(self, timeout_s: float) -> int:
        """Sends SIGTERM and returns the exit code. If the stack has not stopped within ``timeout_s``, kills
        the supervisor and raises :class:`DeadlineError`."""
        self.supervisor.send_signal(signal.SIGTERM)
        try:
            return self.supervisor.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.supervisor.kill()
            raise DeadlineError(
                f"the stack did not stop within {timeout_s:g} s; its log:\n{self.log_tail}"
            ) from None


def launch(
    folder: Path,
    command: str,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    module: str = "twinfang",
) -> LaunchedStack:
    """Starts ``twinfang COMMAND FLAGS`` and does not wait for it. The log and the status file are in
    ``folder``. Python runs ``module`` in place of ``twinfang``, for example a ``twinfang`` with an injected
    fault."""
    with log_path(folder).open("wb") as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", module, *stack_arguments(folder, command, *flags)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | (environment or {}),
        )
    return LaunchedStack(supervisor, folder)


def stack_arguments(folder: Path, command: str, *flags: str) -> list[str]:
    """Returns the command line of a stack on a free port, with its status file in ``folder``."""
    return [command, "--port", "0", "--status-file", str(_status_path(folder)), *flags]


def log_path(folder: Path) -> Path:
    """The log of the stack of this folder."""
    return folder / "log"


def _status_path(folder: Path) -> Path:
    return folder / "status.json"
