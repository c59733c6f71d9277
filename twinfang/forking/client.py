"""The side of the process that starts a fork server and gets the forked processes as its children."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from twinfang.forking.adopted import AdoptedProcess
from twinfang.forking.process import ForkProcess
from wire.errors import TwinfangError

MAX_REPLY_BYTES = 1 << 16
_PR_SET_CHILD_SUBREAPER = 36


class ForkError(TwinfangError):
    """The fork server can't fork a process. It can still be started as usual."""

    code = "fork_failed"


class ForkServer:
    """A process that forks a given number of others (:mod:`twinfang.forking.loop`), then ends. It ends too
    when this process ends."""

    def __init__(self, started: ForkProcess) -> None:
        self._process = started
        self._connection = started.connection
        self._num_forks, self._timeout_s = 0, 0.0
        self._turns = asyncio.Lock()

    @classmethod
    def start(cls, module: str, started: ForkProcess | None = None) -> ForkServer | None:
        """Starts the fork server ``python -m MODULE FD``, unless it is ``started`` already. Returns None if
        this system can't adopt a process that another one has forked."""
        started = started or ForkProcess.start(module)
        return None if started is None else cls(started)

    def prepare(self, task: Any, *, num_forks: int, timeout_s: float) -> None:
        """Sends what to prepare, as JSON. The fork server ends after ``num_forks`` forks. Preparing it and
        one fork may take up to ``timeout_s``."""
        self._num_forks, self._timeout_s = num_forks, timeout_s
        with contextlib.suppress(OSError):  # it has ended; fork() says so
            self._connection.send(json.dumps({"prepare": task}).encode())

    async def fork(
        self, module: str, arguments: Sequence[str], fds: Mapping[str, int], environment: Mapping[str, str]
    ) -> AdoptedProcess:
        """Forks a process that runs ``python -m MODULE ARGUMENTS``. Each flag in ``fds`` is added, with the
        number that its file descriptor has in the new process.

        Raises :class:`ForkError`; the fork server is closed by then.
        """
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "fd_flags": list(fds),
        }
        async with self._turns:
            try:
                pid = await self._ask(json.dumps(request).encode(), list(fds.values()))
            except BaseException:  # cancelled too: a process may have been forked that nobody knows
                self.close()
                raise
            self._num_forks -= 1
            if self._num_forks == 0:
                self.close()
            return AdoptedProcess(pid)

    async def _ask(self, request: bytes, fds: list[int]) -> int:
        loop = asyncio.get_running_loop()
        with adopting():
            try:
                socket.send_fds(self._connection, [request], fds)
                async with asyncio.timeout(self._timeout_s):
                    message = await loop.sock_recv(self._connection, MAX_REPLY_BYTES)
            except TimeoutError:
                raise ForkError(f"it was not ready within {self._timeout_s:g} s") from None
            except OSError as error:
                raise ForkError(str(error)) from error
        if not message:
            raise ForkError("it has ended")
        reply = json.loads(message)
        if "error" in reply:
            raise ForkError(reply["error"])
        return int(reply["pid"])

    def close(self) -> None:
        """Ends the fork server, and a process that it has forked and that nobody waits for. May be called
        several times."""
        if self._connection.fileno() < 0:
            return
        with self._connection:
            with adopting():
                self._process.end()
            with contextlib.suppress(OSError):  # nothing is left to read
                while message := self._connection.recv(MAX_REPLY_BYTES):
                    if pid := json.loads(message).get("pid"):
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)


@contextmanager
def adopting() -> Generator[None]:
    """Makes processes whose parents end in this block children of this process (PR_SET_CHILD_SUBREAPER)."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
