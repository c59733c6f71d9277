"""Servers without a supervisor: what a test kills stays dead until the test starts it again.

| server | role |
|---|---|
| ``prefill-a``, ``prefill-b`` | prefill; leases live for two seconds |
| ``decode`` | decode, with room for four requests and 170 blocks |
| ``decode-local`` | decode with ``--local-prefill``, and room for 64 requests |

They speak without CMA, as between containers, so that a prefill server takes part in being read and a frozen
one holds a read up in its midst. One router for each way of pairing them stands in front.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.faults.injected import FOLDER_VARIABLE
from tests.stack import CALL_TIMEOUT_S, POLL_INTERVAL_S, START_DEADLINE_S, run_async
from twinfang.ports import LOOPBACK, free_ports
from twinfang.readiness import until_ready, until_serving
from wire.generation import GetStats, ServerStats
from wire.rpc import GET_STATS, call, open_channel

LEASE_TTL_S = 2.0
TRANSFER_DEADLINE_S = 2.0
ANSWER_DEADLINE_S = 60.0
PROMPT_S = 15.0
"""What takes no deadline's expiry is over by then, on a loaded machine too."""

_MODEL = ("--max-model-len", "1024", "--threads", "1")
_PREFILL = ("prefill", *_MODEL, "--lease-ttl", str(LEASE_TTL_S), "--max-num-seqs", "64")
_DECODE = ("decode", *_MODEL, "--transfer-deadline", str(TRANSFER_DEADLINE_S))
_SERVERS: dict[str, tuple[str, ...]] = {
    "prefill-a": (*_PREFILL, "--cache-memory", "0.1"),
    "prefill-b": (*_PREFILL, "--cache-memory", "0.1"),
    "decode": (*_DECODE, "--max-num-seqs", "4", "--cache-memory", "0.004"),
    "decode-local": (*_DECODE, "--max-num-seqs", "64", "--cache-memory", "0.1", "--local-prefill"),
}
_ROUTERS: dict[str, tuple[str, ...]] = {
    "alone": ("prefill-a", "decode"),
    "local": ("prefill-a", "decode-local"),
    "two-prefill": ("prefill-a", "prefill-b", "decode"),
    "two-decode": ("prefill-a", "decode", "decode-local"),
    "other": ("prefill-b", "decode"),
}


@dataclass
class Process:
    """One server or router; the same command line, and so the same address, in each of its lives."""

    name: str
    arguments: tuple[str, ...]
    port: int
    folder: Path
    handle: subprocess.Popen[bytes] | None = None

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

    def start(self) -> None:
        faults = self.folder / "faults"
        module = "twinfang" if self.arguments[0] == "router" else "tests.faults.injected"
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.handle = subprocess.Popen(
                [sys.executable, "-m", module, *self.arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"UCX_TLS": "^cma", FOLDER_VARIABLE: str(faults)},
            )

    def kill(self) -> None:
        assert self.handle is not None
        self.handle.kill()
        self.handle.wait(PROMPT_S)

    def freeze(self) -> None:
        assert self.handle is not None
        self.handle.send_signal(signal.SIGSTOP)
        wait_until(
            lambda: psutil.Process(self.handle.pid).status() == psutil.STATUS_STOPPED,  # type: ignore[union-attr]
            f"{self.name} is frozen",
        )

    def thaw(self) -> None:
        assert self.handle is not None
        self.handle.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """A clean end; its exit code."""
        assert self.handle is not None
        self.thaw()
        self.handle.terminate()
        return self.handle.wait(ANSWER_DEADLINE_S)


@dataclass
class Reply:
    """What a client got: an answer's tokens, or the error in their place."""

    status: int
    token_ids: list[int]
    error: str = ""
    seconds: float = 0.0


@dataclass
class Fleet:
    """All processes, by name, and clients to the routers."""

    folder: Path
    servers: dict[str, Process]
    routers: dict[str, Process]
    clients: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(100))

    def __getitem__(self, name: str) -> Process:
        return self.servers.get(name) or self.routers[name]

    # --- processes -------------------------------------------------------------------------------

    def start(self, *names: str) -> None:
        """Starts what does not run of these processes, or of all; returns once routers use all servers."""
        started = [self[name] for name in names or (*self.servers, *self.routers) if not self[name].is_alive]
        for process in started:
            process.start()
        run_async(lambda: asyncio.wait_for(self._until_all_serve(started), START_DEADLINE_S))
        wait_until(self.is_connected, "every router uses all its servers")

    def start_alone(self, name: str) -> None:
        """Starts one server; returns once it serves, whether or not any router knows."""
        self[name].start()
        run_async(lambda: asyncio.wait_for(self._until_all_serve([self[name]]), START_DEADLINE_S))

    async def _until_all_serve(self, processes: list[Process]) -> None:
        await asyncio.gather(
            *(
                until_ready(LOOPBACK, p.port) if p.name in self.routers else until_serving(p.address)
                for p in processes
            )
        )

    def is_connected(self) -> bool:
        for name, router in self.routers.items():
            used = self.metrics(name)
            for role in ("prefill", "decode"):
                wanted = sum(one.startswith(role) for one in _ROUTERS[name])
                if used.get(f'twinfang_servers_connected{{role="{role}"}}') != wanted:
                    return False
            assert router.is_alive, f"router {name} has ended"
        return True

    def heal(self) -> None:
        """Switches all faults off, thaws what is frozen and starts what is dead."""
        for fault in (self.folder / "faults").iterdir():
            fault.unlink()
        for process in (*self.servers.values(), *self.routers.values()):
            if process.is_alive:
                process.thaw()
        self.start()

    @contextlib.contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """Servers have this fault of :mod:`tests.faults.injected` inside the block."""
        switch = self.folder / "faults" / name
        switch.touch()
        yield
        switch.unlink(missing_ok=True)

    # --- what they say ---------------------------------------------------------------------------

    def stats(self, name: str) -> ServerStats:
        async def ask() -> ServerStats:
            async with open_channel(self[name].address) as channel:
                reply: ServerStats = await call(channel, GET_STATS, GetStats(), timeout_s=CALL_TIMEOUT_S)
                return reply

        stats: ServerStats = run_async(ask)
        return stats

    def metrics(self, router: str) -> dict[str, float]:
        """Name with labels → value."""
        text = httpx.get(f"{self[router].url}/metrics", timeout=CALL_TIMEOUT_S).text
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    def retries(self, router: str) -> dict[str, float]:
        """Retries so far, by the code of what went wrong."""
        prefix = 'twinfang_request_retries_total{code="'
        found = self.metrics(router).items()
        return {name[len(prefix) : -2]: value for name, value in found if name.startswith(prefix)}

    def is_idle(self) -> bool:
        """All servers are."""
        return all(map(self.is_idle_alone, self.servers))

    def is_idle_alone(self, name: str) -> bool:
        """No request, lease or transfer is there, and every block and slot is free."""
        s = self.stats(name)
        busy = (s.num_waiting, s.num_running, s.leases_held, s.transfers_in_flight)
        return busy == (0, 0, 0, 0) and (s.free_blocks, s.free_slots) == (s.num_blocks, s.num_slots)

    # --- requests --------------------------------------------------------------------------------

    def send(self, router: str, body: dict[str, Any]) -> Future[Reply]:
        """Sends a completion's request in the background."""
        return self.clients.submit(self._complete, f"{self[router].url}/v1/completions", body)

    @staticmethod
    def _complete(url: str, body: dict[str, Any]) -> Reply:
        started = time.monotonic()
        response = httpx.post(url, json=body, timeout=ANSWER_DEADLINE_S)
        seconds = time.monotonic() - started
        answer = response.json()
        if response.status_code != 200:
            return Reply(response.status_code, [], answer["error"]["message"], seconds)
        return Reply(200, answer["choices"][0]["token_ids"], seconds=seconds)

    def leased(self, name: str, count: int) -> None:
        """Returns once the server ``name`` holds ``count`` leases."""
        wait_until(lambda: self.stats(name).leases_held == count, f"{name} holds {count} leases")


@contextlib.contextmanager
def running_fleet(folder: Path) -> Iterator[Fleet]:
    """Starts all; at the end each process must stop cleanly."""
    (folder / "faults").mkdir()
    ports = dict(zip((*_SERVERS, *_ROUTERS), free_ports(len(_SERVERS) + len(_ROUTERS)), strict=True))
    servers, routers = {}, {}
    for name, arguments in _SERVERS.items():
        full = (*arguments, "--port", str(ports[name]), "--name", name)
        servers[name] = Process(name, full, ports[name], folder)
    for name, behind in _ROUTERS.items():
        addresses = [f"--{_SERVERS[one][0]}={LOOPBACK}:{ports[one]}" for one in behind]
        routers[name] = Process(
            name, ("router", *addresses, "--port", str(ports[name]), "--name", name), ports[name], folder
        )
    fleet = Fleet(folder, servers, routers)
    processes = [*routers.values(), *servers.values()]
    try:
        fleet.start()
        yield fleet
        for process in processes:
            if process.is_alive:
                assert process.stop() == 0, f"{process.name} did not stop cleanly\n{process.log[-2000:]}"
    finally:
        for process in processes:
            if process.is_alive:
                process.kill()
        fleet.clients.shutdown()


def wait_until(condition: Callable[[], object], what: str, deadline_s: float = PROMPT_S) -> None:
    limit = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < limit, f"not within {deadline_s} s: {what}"
        time.sleep(POLL_INTERVAL_S)
