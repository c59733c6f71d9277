"""A child of this process that was not started by :mod:`subprocess`."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading


class ForkedProcess:
    """Has what tests need of :class:`subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        """Returns the exit code, or None while the process runs. A negative code is the signal that ended
        it."""
        with self._reaping:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit code. Raises :class:`subprocess.TimeoutExpired` if the
        process runs for longer than ``timeout`` seconds."""
        if (code := self.poll()) is not None:
            return code
        pidfd = os.pidfd_open(self.pid)
        try:
            select.select([pidfd], [], [], timeout)
        finally:
            os.close(pidfd)
        if (code := self.poll()) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def send_signal(self, sig: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
