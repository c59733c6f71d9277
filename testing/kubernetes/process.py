"""Programs that run at the same time as the tests and end with them, however the tests end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER_VARIABLE = "KUBERNETES"
"""Environment variable with a folder of programs; programs that are missing there are looked for in PATH."""
STOP_DEADLINE_S = 5.0
"""Short, because an API server that stops waits for its watches, and these never end."""
TAIL_BYTES = 6000
PROGRAMS = ("kube-apiserver", "etcd", "openssl", "setpriv", "unshare")


class ProgramMissingError(Exception):
    """A program is missing; the message says where it was looked for and how to get it."""


def find_program(name: str) -> str:
    folder = os.environ.get(FOLDER_VARIABLE, "")
    found = shutil.which(name, path=os.pathsep.join(filter(None, [folder, os.environ.get("PATH", "")])))
    if found is None:
        where = f"in {folder} or in PATH" if folder else "in PATH"
        raise ProgramMissingError(
            f"no program {name} {where}: tests/kubernetes/README.md says how to get it; give the folder "
            f"that has it, as in make test-kubernetes {FOLDER_VARIABLE}=/opt/kubernetes/bin"
        )
    return found


class Process:
    """One program. It may be started again after its end. Linux kills it if the tests are killed.

    Start it from the main thread: Linux kills it when the thread that started it ends.
    """

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        self._command = [find_program("setpriv"), "--pdeathsig", "KILL", "--", *command]
        self._environment = os.environ | (environment or {})
        self._running: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._running is not None and self._running.poll() is None

    def start(self) -> None:
        assert not self.is_running
        with self.log.open("ab") as log:
            self._running = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )

    def stop(self) -> None:
        """Stops the program in order, or by force if that takes too long."""
        self.signal(signal.SIGTERM)
        if self._running is not None:
            try:
                self._running.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self._running is not None:
            self._running.wait(STOP_DEADLINE_S)

    def signal(self, signum: signal.Signals) -> None:
        if self.is_running:
            assert self._running is not None
            self._running.send_signal(signum)

    @property
    def log_tail(self) -> str:
        return self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace") if self.log.exists() else ""
