"""A real Redis server."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from testing.conditions import wait_until
from twinfang.stack.ports import LOOPBACK, free_ports

PROGRAM = "redis-server"


@dataclass
class RedisServer:
    """One server, which keeps what it has written in ``folder``. Signals reach it as they reach any
    process."""

    folder: Path
    port: int = field(default_factory=lambda: free_ports(1)[0])
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self.port}/0"

    def start(self) -> None:
        arguments = ["--port", str(self.port), "--bind", LOOPBACK, "--dir", str(self.folder)]
        arguments += ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        self.process = subprocess.Popen(
            [PROGRAM, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(self._answers, "Redis answers")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False


@contextlib.contextmanager
def running_redis(folder: Path) -> Iterator[RedisServer]:
    """Run a server until the end of the block. Skips the test where there is no program."""
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"there is no {PROGRAM}: install Debian's package of that name")
    server = RedisServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
