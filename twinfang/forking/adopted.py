"""A forked process that has become a child of this one."""

from __future__ import annotations

import asyncio
import os
import signal


class AdoptedProcess:
    """Has what :class:`asyncio.subprocess.Process` has as far as a supervisor needs it."""

    def __init__(self, pid: int) -> None:
        """Must be called on the event loop that waits for the process."""
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._reap)

    def _reap(self) -> None:
        """Called when the process has ended."""
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()

    async def wait(self) -> int:
        """Waits for the end and returns the exit code. A negative code is the signal that ended it."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: signal.Signals) -> None:
        """Raises :class:`ProcessLookupError` if the process has ended."""
        if self.returncode is not None:
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, signum)  # it can't be another process: its pid is free only after _reap
