"""One process of a stack: its command line, start, readiness and stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from twinfang.forking.client import ForkError, ForkServer
from twinfang.stack.core_wait import CoreWait

log = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-m", "twinfang")
"""The program of every process of a stack."""


LOOK_INTERVAL_S = 0.5
MAX_CORE_WAIT_S = 60.0
"""Maximum time that is added to a stop's grace. If this is too short on a machine, the machine can't serve
requests anyway."""


HURRIED_S = 2.0
"""Time that a stop may still take after the second SIGTERM, in which a router tells its clients."""


@dataclass(frozen=True)
class ChildSpec:
    """What to run, and how to notice that it is ready."""

    name: str
    arguments: tuple[str, ...]
    """A ``twinfang`` command line, without the program."""
    address: str
    """``host:port`` on which it listens."""
    until_ready: Callable[[], Awaitable[None]]
    stop_grace_s: float
    """Time that a clean stop may take after SIGTERM; :class:`StopClock` extends it on a busy machine."""
    metrics_url: str | None = None
    fate: str = ""
    """Children with the same fate live together: if one dies, the others are ended and all are restarted."""
    hurried_s: float = HURRIED_S
    may_be_forked: bool = False
    """Whether its first start may be a fork of a process that has imported what it needs."""


class Process(Protocol):
    """What a supervisor needs of a running process, however it was started."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def send_signal(self, signum: signal.Signals) -> None: ...


class StopClock:
    """The rest of the time that a process has for its stop. Time in which the process waits for a core does
    not count: it can't stop without a core, and a killed process can't hand its requests to other servers."""

    def __init__(self, pid: int, grace_s: float) -> None:
        self._core_wait = CoreWait(pid)
        self._looked_s = time.monotonic()
        self._grace_s = grace_s
        self._waited_s = 0.0

    def shorten(self, grace_s: float) -> None:
        """Leaves at most ``grace_s``."""
        self._grace_s = min(self._grace_s, grace_s)

    def left_s(self) -> float:
        """Returns the seconds that are left from now on."""
        now_s = time.monotonic()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        waited_s = min(self._core_wait.since_last_s(), passed_s, MAX_CORE_WAIT_S - self._waited_s)
        self._waited_s += waited_s
        self._grace_s -= passed_s - waited_s
        return self._grace_s


class Child:
    """The process of one :class:`ChildSpec`, over all its restarts."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.is_ready = False
        self.first_ready = asyncio.Event()
        """Set when the child is ready for the first time, and never cleared."""
        self.num_restarts = 0
        self._process: Process | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """None while the child does not run."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    async def start(
        self,
        *,
        lifeline_fd: int,
        turn_fd: int | None = None,
        environment: Mapping[str, str],
        forks: ForkServer | None = None,
    ) -> None:
        """Starts the process in a separate process group, so that Ctrl-C reaches only the supervisor, which
        stops its children in order. The process does not get a separate session, because Linux may give each
        session the same share of the cores (autogroup), whatever the niceness of its threads. With
        ``turn_fd`` it waits for its turn (:mod:`twinfang.turn`). ``forks`` starts it if it may be forked and
        starts for the first time."""
        self.is_ready = False
        pipes = {"--lifeline": lifeline_fd} | ({} if turn_fd is None else {"--turn": turn_fd})
        if forks is not None and self.spec.may_be_forked and self.num_restarts == 0:
            try:
                self._process = await forks.fork(PROGRAM[-1], self.spec.arguments, pipes, environment)
                return
            except ForkError as error:
                log.warning("%s starts without the fork server: %s", self.name, error.message)
        self._process = await asyncio.create_subprocess_exec(
            *(*PROGRAM, *self.spec.arguments, *chain(*((flag, str(fd)) for flag, fd in pipes.items()))),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=tuple(pipes.values()),
            process_group=0,
            env=dict(environment),
        )

    async def wait(self) -> int:
        """Waits for the process's end and returns the exit code. A negative code is the signal that ended
        it."""
        assert self._process is not None
        code = await self._process.wait()
        self.is_ready = False
        return code

    async def wait_while(self, condition: Awaitable[Any], timeout_s: float | None = None) -> bool:
        """Waits for a condition as long as the process lives. Returns whether it came true in time."""
        exited = asyncio.ensure_future(self.wait())
        true = asyncio.ensure_future(condition)
        try:
            await asyncio.wait({exited, true}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return true.done() and not exited.done()
        finally:
            for task in (exited, true):
                task.cancel()
            await asyncio.gather(exited, true, return_exceptions=True)

    async def wait_until_ready(self, timeout_s: float) -> bool:
        """Waits until the child is ready. Returns False if it ended or was not ready in time."""
        self.is_ready = await self.wait_while(self.spec.until_ready(), timeout_s)
        if self.is_ready:
            self.first_ready.set()
        return self.is_ready

    async def stop(self, hurry: asyncio.Event, at_once: asyncio.Event) -> int | None:
        """Sends SIGTERM, then SIGKILL after the grace. When ``hurry`` is set, sends a second SIGTERM, and the
        grace is at most ``hurried_s``; when ``at_once`` is set, it is over. Returns the exit code, 0 if the
        child did not run, or None if it had to be killed."""
        if self.pid is None:
            return 0
        clock = StopClock(self.pid, self.spec.stop_grace_s)
        self._signal(signal.SIGTERM)
        exited = asyncio.ensure_future(self.wait())
        hurried, ended = asyncio.ensure_future(hurry.wait()), asyncio.ensure_future(at_once.wait())
        waiting: set[asyncio.Future[Any]] = {exited, hurried, ended}
        while not (exited.done() or ended.done()) and (left_s := clock.left_s()) > 0:
            if hurried in waiting and hurried.done():
                waiting.remove(hurried)
                self._signal(signal.SIGTERM)
                clock.shorten(self.spec.hurried_s)
            await asyncio.wait(
                waiting, timeout=min(left_s, LOOK_INTERVAL_S), return_when=asyncio.FIRST_COMPLETED
            )
        for waits in (hurried, ended):
            waits.cancel()
        in_time = exited.done()
        if not in_time:
            self._signal(signal.SIGKILL)
        code = await exited
        return code if in_time else None

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, signum: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended a moment ago
                self._process.send_signal(signum)


def describe_exit(code: int) -> str:
    """Returns an exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
