"""The compared arrangements: how each is started, which resources it gets, and how it is stopped.

All get the same: the cores that this process may use (children inherit the mask), concurrent requests, memory
for caches, the longest prompt and answer, the dtype of weights. How an arrangement divides the cores among
its processes is its own default unless flags say otherwise; the report lists every command line.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import httpx

from testing.checkpoints.random_model import MAX_MODEL_LEN
from twinfang.launch import launch
from twinfang.stack.ports import free_ports
from wire.errors import DeadlineError, UnavailableError

START_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.1
LOG_TAIL_CHARS = 4000

MAX_NUM_SEQS = 32
CACHE_GIB = 4
ANY_MODEL = Path("MODEL")
STACK_ENVIRONMENT = {"TWINFANG_SANITIZE": "0"}
MORTAL_STACK = "benchmarks.side_by_side.contenders.mortal_stack"


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    pids: tuple[int, ...]
    """Ids of its first processes; all others descend from these."""


class Arrangement(Protocol):
    """One way of serving a model."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str:
        """The title in tables and plots."""

    @property
    def share(self) -> float:
        """Share of the usual number of requests: a slow arrangement that does the same for each batch needs
        fewer."""

    def running(self, model: Path) -> AbstractContextManager[Server]:
        """Runs the arrangement; it answers inside the block.

        Raises :class:`UnavailableError` if it ends too soon, :class:`DeadlineError` if it is not ready in
        time.
        """

    def settings(self) -> dict[str, object]:
        """All that is needed to run the same by hand, except ports and folders."""


@dataclass(frozen=True)
class Stack:
    """Twinfang's servers and router: ``twinfang up`` or ``twinfang serve``."""

    name: str
    title: str
    flags: str = ""
    """Further flags, as a shell would read them."""
    share: float = 1.0

    def settings(self) -> dict[str, object]:
        command = shlex.join(["twinfang", self.name, *self._flags(ANY_MODEL)])
        return {"title": self.title, "command": command, "environment": STACK_ENVIRONMENT}

    @contextmanager
    def running(self, model: Path) -> Iterator[Server]:
        with tempfile.TemporaryDirectory(prefix="side-by-side-") as logs:
            flags, environment = self._flags(model), STACK_ENVIRONMENT
            stack = launch(Path(logs), self.name, *flags, environment=environment, module=MORTAL_STACK)
            try:
                stack.wait_until_ready(START_TIMEOUT_S)
                yield Server(stack.url, (stack.supervisor.pid,))
            finally:
                if stack.supervisor.poll() is None:
                    stack.stop(STOP_TIMEOUT_S)

    def _flags(self, model: Path) -> list[str]:
        capacity = f"--max-num-seqs {MAX_NUM_SEQS} --cache-memory {CACHE_GIB} --max-model-len {MAX_MODEL_LEN}"
        words = f"--dtype float32 {capacity} --log-level warning {self.flags}"
        return ["--model", str(model), *shlex.split(words)]


@dataclass(frozen=True)
class Process:
    """Another project's server, as one command."""

    name: str
    title: str
    command: Callable[[Path, int], list[str]]
    """Returns the command from the model's directory and the port."""
    environment: dict[str, str]
    """Added to the inherited environment; an empty value removes a variable."""
    share: float = 1.0
    prepare: Callable[[Path], Path] = lambda model: model
    """Returns what ``command`` gets instead of the model's directory, for example another file format."""

    def settings(self) -> dict[str, object]:
        program, *flags = self.command(ANY_MODEL, 0)
        command = shlex.join([Path(program).name, *flags])
        environment = {name: file_names(value) for name, value in self.environment.items()}
        return {"title": self.title, "command": command, "environment": environment}

    @contextmanager
    def running(self, model: Path) -> Iterator[Server]:
        [port] = free_ports(1)
        with started(self.command(self.prepare(model), port), self.environment) as (process, log):
            url = local_url(port)
            wait_until_ready(url, process, log)
            yield Server(url, (process.pid,))


@dataclass(frozen=True)
class Pair:
    """Another project's prefill server, decode server and router."""

    name: str
    title: str
    prefill: Process
    decode: Process
    router: Callable[[str, str, int], list[str]]
    """Returns the router's command from the addresses of both and the port."""
    side_channel: str
    """The variable that gives a server another port of its own, at which the other server finds it."""
    share: float = 1.0

    def settings(self) -> dict[str, object]:
        router = self.router("PREFILL", "DECODE", 0)
        return {
            "title": self.title,
            "prefill": self.prefill.settings(),
            "decode": self.decode.settings(),
            "router": shlex.join([Path(router[0]).name, *router[1:]]),
            "side_channel": self.side_channel,
        }

    @contextmanager
    def running(self, model: Path) -> Iterator[Server]:
        *ports, port = free_ports(5)
        with ExitStack() as stack:
            servers = [
                (
                    local_url(own),
                    stack.enter_context(started(one.command(model, own), one.environment | side)),
                )
                for one, own, side in (
                    (self.prefill, ports[0], {self.side_channel: str(ports[2])}),
                    (self.decode, ports[1], {self.side_channel: str(ports[3])}),
                )
            ]
            for url, (process, log) in servers:
                wait_until_ready(url, process, log)
            command = self.router(servers[0][0], servers[1][0], port)
            router, log = stack.enter_context(started(command, {}))
            wait_until_ready(local_url(port), router, log)
            yield Server(local_url(port), (router.pid, *(process.pid for _, (process, _) in servers)))


# --- processes ------------------------------------------------------------------------------------


@contextmanager
def started(
    command: list[str], environment: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Yields a process and its log; stops the process in the end. An empty value removes a variable.

    If this program is killed, the process gets SIGTERM, where the command ``setpriv`` is installed. A server
    that outlived its benchmark would take cores from the next one.
    """
    setpriv = shutil.which("setpriv")
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command if setpriv is None else [setpriv, "--pdeathsig", "TERM", "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in (os.environ | environment).items() if value},
            start_new_session=True,
        )
        try:
            yield process, log
        finally:
            stop(process)


def local_url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    """Waits until the server answers. Raises :class:`UnavailableError` if the process ends before that,
    :class:`DeadlineError` if it is not ready in time."""
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
    """Returns the log's end, without moving the position at which the server writes."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), LOG_TAIL_CHARS, max(0, size - LOG_TAIL_CHARS)).decode(errors="replace")


def file_names(value: str) -> str:
    """Returns ``value`` without the folders of files named in it, which mean nothing on other machines."""
    return ":".join(Path(part).name for part in value.split(":"))


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stops its whole process group: a process that outlived it would take cores from the next
    arrangement."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
