"""Servers and routers without a supervisor: a killed process stays dead until somebody starts it again.

The fault tests and the soak disturb these processes on purpose. All processes end with the process that
started them, whatever ended it: running processes notice that their lifeline is broken. Frozen processes get
a hang-up signal from the operating system, because each leads a process group that becomes orphaned.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import grpc
import httpx
import psutil

from testing.conditions import PROMPT_S, wait_until
from testing.forking.start import start_process
from twinfang.launch import RunningProcess
from twinfang.stack.ports import LOOPBACK, free_ports, ports_held
from wire.codec import decode, encode
from wire.messages.generation import GetStats, ServerStats
from wire.rpc import CLIENT_OPTIONS, GET_STATS

START_DEADLINE_S = 200.0
"""Long, because the first start on a machine compiles kernels."""
STOP_DEADLINE_S = 60.0
CALL_TIMEOUT_S = 10.0
START_INTERVAL_S = 0.2
"""Polling interval; not shorter, because starting processes, and routers that connect, need the cores."""


@dataclass(frozen=True)
class Place:
    """Where a process runs; by default on this machine's loopback address."""

    address: str = LOOPBACK
    """The address by which other processes reach it. From here, its port is always one of ``LOOPBACK``."""
    command: tuple[str, ...] = ()
    """Prefix of the command line that runs the process there."""


HERE = Place()


@dataclass
class Process:
    """One server or router. Each of its lives has the same command line, and so the same address."""

    name: str
    arguments: tuple[str, ...]
    port: int
    folder: Path
    """The folder of its log."""
    module: str = "twinfang"
    environment: Mapping[str, str] = field(default_factory=dict)
    place: Place = HERE
    metrics_port: int | None = None
    """None: it has no metrics page."""
    handle: RunningProcess | None = None

    @property
    def role(self) -> str:
        return self.arguments[0]

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text(encoding="utf-8", errors="replace")

    @property
    def is_alive(self) -> bool:
        return self.handle is not None and self.handle.poll() is None

    def start(self, lifeline_fd: int) -> None:
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.handle = start_process(
                self.module,
                self.arguments,
                log=log,
                environment=self.environment,
                fds={"--lifeline": lifeline_fd},
                prefix=self.place.command,
                own_group=True,
            )

    def kill(self) -> None:
        assert self.handle is not None
        self.handle.kill()
        self.handle.wait(PROMPT_S)

    def freeze(self) -> None:
        """Freezes the process. Returns once it is frozen or has ended."""
        assert self.handle is not None
        self.handle.send_signal(signal.SIGSTOP)
        wait_until(lambda: not self.is_alive or self._is_stopped(), f"{self.name} is frozen")

    def _is_stopped(self) -> bool:
        assert self.handle is not None
        return psutil.Process(self.handle.pid).status() == psutil.STATUS_STOPPED

    def thaw(self) -> None:
        assert self.handle is not None
        self.handle.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """Stops the process cleanly; returns its exit code."""
        assert self.handle is not None
        self.thaw()
        self.handle.terminate()
        return self.handle.wait(STOP_DEADLINE_S)


@dataclass
class Fleet:
    """All processes, by name, and their metrics and stats."""

    folder: Path
    servers: dict[str, Process]
    routers: dict[str, Process]
    behind: Mapping[str, tuple[str, ...]]
    """Names of each router's servers."""
    lifeline: tuple[int, int] = field(default_factory=os.pipe)

    def __getitem__(self, name: str) -> Process:
        return self.servers.get(name) or self.routers[name]

    @property
    def processes(self) -> list[Process]:
        """Returns all processes, routers first: this is the order in which they are stopped."""
        return [*self.routers.values(), *self.servers.values()]

    def start(self, *names: str) -> None:
        """Starts those of the named processes (without names: of all processes) that don't run. Returns once
        routers use all servers."""
        started = [self[name] for name in names or (*self.servers, *self.routers) if not self[name].is_alive]
        self._start(started)
        wait_until(self.is_connected, "every router uses all its servers", interval_s=START_INTERVAL_S)

    def start_alone(self, name: str) -> None:
        """Starts one process. Returns once it serves, even if no router knows it yet."""
        self._start([self[name]])

    def _start(self, processes: list[Process]) -> None:
        for process in processes:
            process.start(self.lifeline[0])
        names = ", ".join(process.name for process in processes)
        wait_until(
            lambda: all(map(self.serves, processes)),
            f"all serve: {names}",
            START_DEADLINE_S,
            interval_s=START_INTERVAL_S,
        )

    def serves(self, process: Process) -> bool:
        """Returns whether the process answers. Raises :class:`AssertionError` if it has ended."""
        assert process.is_alive, f"{process.name} has ended\n{process.log[-2000:]}"
        try:
            if process.name in self.routers:
                return httpx.get(f"{process.url}/readyz", timeout=CALL_TIMEOUT_S).status_code == 200
            self.stats(process.name)
        except (grpc.RpcError, httpx.HTTPError):
            return False
        return True

    def is_connected(self, roles: tuple[str, ...] = ("prefill", "decode")) -> bool:
        """Returns whether every router uses all its servers of these roles."""
        for name, router in self.routers.items():
            assert router.is_alive, f"router {name} has ended"
            used = self.metrics(name)
            for role in roles:
                wanted = sum(self.servers[one].role == role for one in self.behind[name])
                if used.get(f'twinfang_servers_connected{{role="{role}"}}') != wanted:
                    return False
        return True

    def heal(self) -> None:
        """Thaws frozen processes and starts dead ones."""
        for process in self.processes:
            if process.is_alive:
                process.thaw()
        self.start()

    # --- what they say ---------------------------------------------------------------------------

    def stats(self, name: str) -> ServerStats:
        """Returns a server's load and memory. Raises :class:`grpc.RpcError` if it does not answer."""
        with grpc.insecure_channel(self[name].address, options=CLIENT_OPTIONS) as channel:
            answer = channel.unary_unary(GET_STATS.path)(encode(GetStats()), timeout=CALL_TIMEOUT_S)
        return decode(answer, ServerStats)

    def metrics(self, router: str) -> dict[str, float]:
        """Returns a router's metrics: name with labels → value."""
        text = httpx.get(f"{self[router].url}/metrics", timeout=CALL_TIMEOUT_S).text
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    def retries(self, router: str) -> dict[str, float]:
        """Returns the retries so far, by the code of the error."""
        prefix = 'twinfang_request_retries_total{code="'
        found = self.metrics(router).items()
        return {name[len(prefix) : -2]: value for name, value in found if value and name.startswith(prefix)}

    def is_idle(self) -> bool:
        """Returns whether all servers are idle."""
        return all(map(self.is_idle_alone, self.servers))

    def is_idle_alone(self, name: str) -> bool:
        """Returns whether the server has no request, lease or transfer, and every block and slot is free."""
        return not any(held(self.stats(name)).values())


def held(stats: ServerStats) -> dict[str, int]:
    """Returns what a server has not given back. Quarantined memory counts as blocks and slots."""
    return {
        "requests": stats.num_waiting + stats.num_running,
        "leases": stats.leases_held,
        "transfers": stats.transfers_in_flight,
        "blocks": stats.num_blocks - stats.free_blocks,
        "slots": stats.num_slots - stats.free_slots,
    }


def make_processes(
    folder: Path,
    servers: Mapping[str, tuple[str, ...]],
    routers: Mapping[str, tuple[str, ...]],
    *,
    router_flags: tuple[str, ...] = (),
    server_module: str = "twinfang",
    environment: Mapping[str, str],
    places: Mapping[str, Place] = MappingProxyType({}),
    with_metrics: Collection[str] = (),
) -> tuple[dict[str, Process], dict[str, Process]]:
    """Returns servers and routers by name, with their command lines. Nothing is started.

    The servers ``with_metrics`` have a metrics page. The others have none, because other processes might use
    the metrics ports.
    """
    listening = (*servers, *routers, *(f"metrics of {name}" for name in with_metrics))
    ports = dict(zip(listening, free_ports(len(listening)), strict=True))

    def process(name: str, module: str, *arguments: str) -> Process:
        place = places.get(name, HERE)
        full = (*arguments, "--host", place.address, "--port", str(ports[name]), "--name", name)
        metrics = ports.get(f"metrics of {name}")
        return Process(name, full, ports[name], folder, module, environment, place, metrics)

    def addresses(behind: tuple[str, ...]) -> list[str]:
        return [f"--{servers[one][0]}={places.get(one, HERE).address}:{ports[one]}" for one in behind]

    def metrics(name: str) -> tuple[str, str]:
        return "--metrics-port", str(ports.get(f"metrics of {name}", "off"))

    return (
        {
            name: process(name, server_module, *arguments, *metrics(name))
            for name, arguments in servers.items()
        },
        {
            name: process(name, "twinfang", "router", *addresses(behind), *router_flags)
            for name, behind in routers.items()
        },
    )


@contextlib.contextmanager
def running(fleet: Fleet) -> Iterator[None]:
    """Starts all processes. After the block each must stop cleanly. In any case no process is left running.

    Ports are reserved for processes that listen on this host. For a process on another host, a relay already
    listens at the port.
    """
    try:
        with ports_held(process.address for process in fleet.processes if process.place is HERE):
            fleet.start()
            yield
        for process in fleet.processes:
            if process.is_alive:
                assert process.stop() == 0, f"{process.name} did not stop cleanly\n{process.log[-2000:]}"
    finally:
        for process in fleet.processes:
            if process.is_alive:
                process.kill()
        for fd in fleet.lifeline:
            os.close(fd)
