"""What is compared: how each arrangement is started, what it is given, and how it is stopped.

All are given the same: the cores that this process may use (children inherit the mask), requests at once,
memory for caches, the longest prompt and answer, float32. How an arrangement shares the cores among its
processes is left to its defaults unless flags say otherwise; the report has every command line.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import httpx

from benchmarks.side_by_side.random_model import MAX_MODEL_LEN
from twinfang.launch import launch
from twinfang.ports import free_ports
from wire.errors import DeadlineError, UnavailableError

START_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.1
LOG_TAIL_CHARS = 4000

MAX_NUM_SEQS = 32
CACHE_GIB = 4
ANY_MODEL = Path("MODEL")
STACK_ENVIRONMENT = {"TWINFANG_SANITIZE": "0"}


@dataclass(frozen=True)
class Server:
    """One that answers."""

    url: str
    pid: int
    """Of its first process; all others descend from it."""


class Arrangement(Protocol):
    """One way of serving a model."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str:
        """In tables and plots."""

    @property
    def share(self) -> float:
        """Of the usual number of requests: what is slow and does the same for each batch needs fewer."""

    def running(self, model: Path) -> AbstractContextManager[Server]:
        """It answers within the block.

        Raises :class:`UnavailableError` if it ends too soon, :class:`DeadlineError` if it is late.
        """

    def settings(self) -> dict[str, object]:
        """What somebody needs who wants to run the same by hand, but for ports and folders."""


@dataclass(frozen=True)
class Stack:
    """Twinfang's servers and router: ``twinfang up`` or ``twinfang serve``."""

    name: str
    title: str
    flags: str = ""
    """Further ones, as a shell would read them."""
    share: float = 1.0

    def settings(self) -> dict[str, object]:
        command = shlex.join(["twinfang", self.name, *self._flags(ANY_MODEL)])
        return {"title": self.title, "command": command, "environment": STACK_ENVIRONMENT}

    @contextmanager
    def running(self, model: Path) -> Iterator[Server]:
        with tempfile.TemporaryDirectory(prefix="side-by-side-") as logs:
            stack = launch(Path(logs), self.name, *self._flags(model), environment=STACK_ENVIRONMENT)
            try:
                stack.wait_until_ready(START_TIMEOUT_S)
                yield Server(stack.url, stack.supervisor.pid)
            finally:
                if stack.supervisor.poll() is None:
                    stack.stop(STOP_TIMEOUT_S)

    def _flags(self, model: Path) -> list[str]:
        capacity = f"--max-num-seqs {MAX_NUM_SEQS} --cache-memory {CACHE_GIB} --max-model-len {MAX_MODEL_LEN}"
        words = f"--dtype float32 {capacity} --log-level warning {self.flags}"
        return ["--model", str(model), *shlex.split(words)]


@dataclass(frozen=True)
class Process:
    """A server of somebody else's, as one command."""

    name: str
    title: str
    command: Callable[[Path, int], list[str]]
    """Of the model's directory and the port."""
    environment: dict[str, str]
    """Over what is inherited; an empty value takes a variable away."""
    share: float = 1.0

    def settings(self) -> dict[str, object]:
        program, *flags = self.command(ANY_MODEL, 0)
        command = shlex.join([Path(program).name, *flags])
        environment = {name: file_names(value) for name, value in self.environment.items()}
        return {"title": self.title, "command": command, "environment": environment}

    @contextmanager
    def running(self, model: Path) -> Iterator[Server]:
        [port] = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        environment = {name: value for name, value in (os.environ | self.environment).items() if value}
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                self.command(model, port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                wait_until_ready(url, process, log)
                yield Server(url, process.pid)
            finally:
                stop(process)


# --- processes ------------------------------------------------------------------------------------


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    """Raises :class:`UnavailableError` if the process ends before, :class:`DeadlineError` if it is late."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/v1/models", timeout=5.0).status_code == 200:
                return
        if process.poll() is not None:
            raise UnavailableError(f"the server ended with code {process.returncode}; its log:\n{tail(log)}")
        if time.monotonic() > deadline:
            raise DeadlineError(f"not ready within {START_TIMEOUT_S:g} s; the server's log:\n{tail(log)}")
        time.sleep(POLL_INTERVAL_S)


def tail(log: IO[bytes]) -> str:
    """Its end, read without moving the position at which the server goes on writing."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), LOG_TAIL_CHARS, max(0, size - LOG_TAIL_CHARS)).decode(errors="replace")


def file_names(value: str) -> str:
    """``value`` without the folders of files named in it: they tell nothing elsewhere."""
    return ":".join(Path(part).name for part in value.split(":"))


def stop(process: subprocess.Popen[bytes]) -> None:
    """Its whole process group: what outlived it would take cores from the next arrangement."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
