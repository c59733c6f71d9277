"""The fleet that all tests of this folder disturb.

| server | role |
|---|---|
| ``prefill-a``, ``prefill-b`` | prefill; leases live for two seconds |
| ``decode`` | decode, with room for four requests and 170 blocks |
| ``decode-local`` | decode with ``--local-prefill``, and room for 64 requests |

As between containers, the servers don't use CMA (reads of another process's memory without its help). So a
prefill server takes part in each read, and a frozen prefill server stops a read halfway. Each pairing of
servers has its own router.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx

from testing.conditions import wait_until
from testing.faults.network import Host, Network
from testing.fleets import slowed
from testing.fleets.fault_folder import FOLDER_VARIABLE, switched_on
from testing.fleets.fleet import START_DEADLINE_S, make_processes, running
from testing.fleets.fleet import Fleet as ServerFleet
from testing.fleets.injected import WAITS
from wire.messages.generation import ServerStats

LEASE_TTL_S = 2.0
TRANSFER_DEADLINE_S = 2.0
ANSWER_DEADLINE_S = 60.0
HOLD_S = 15.0
"""Time that routers wait for a server that is frozen, or that answers so late on a loaded machine that
routers take it for absent."""
ADMIN_TOKEN = "of-the-fleet-that-tests-disturb-0123456789"

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
_NETWORK_ROUTERS: dict[str, tuple[str, ...]] = {
    "alone": ("prefill-a", "decode"),
    "local": ("prefill-a", "decode-local"),
    "two-prefill": ("prefill-a", "prefill-b", "decode"),
    "two-decode": ("prefill-b", "decode", "decode-local"),
}
FRONT = "front"
HOSTS = (*_SERVERS, FRONT)
"""Hosts of a network: one for each server, and one for the routers."""


@dataclass
class Reply:
    """A client's result: an answer's tokens, or an error."""

    status: int
    token_ids: list[int]
    error: str = ""
    seconds: float = 0.0


@dataclass
class Fleet(ServerFleet):
    """All processes, by name, faults that can be switched on in them, and clients to the routers."""

    clients: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(100))

    def heal(self) -> None:
        """Switches all faults off, thaws what is frozen and starts what is dead."""
        for fault in (self.folder / "faults").iterdir():
            fault.unlink()
        super().heal()

    @contextlib.contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """Servers have this fault of :mod:`testing.fleets.injected` inside the block."""
        with switched_on(self.folder / "faults", name):
            yield

    @contextlib.contextmanager
    def nobody_waits(self, router: str) -> Iterator[None]:
        """Inside the block, requests on this router don't wait for an absent server."""
        self._hold(router, 0.0)
        try:
            yield
        finally:
            self._hold(router, HOLD_S)

    def _hold(self, router: str, hold_s: float) -> None:
        url = f"{self[router].url}/admin/v1/config"
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        answer = httpx.patch(url, headers=headers, json={"hold_s": hold_s}, timeout=ANSWER_DEADLINE_S)
        answer.raise_for_status()

    @contextlib.contextmanager
    def spare(self, name: str) -> Iterator[None]:
        """The process ``name`` is killed inside the block; soon after the kill, it is started again."""
        successor = dataclasses.replace(self[name])
        num_waits = successor.log.count(WAITS)
        with self.fault("late-start"):
            successor.start(self.lifeline[0])
            wait_until(
                lambda: successor.log.count(WAITS) > num_waits,
                f"another {name} has been imported",
                START_DEADLINE_S,
            )
            yield
        self.servers[name] = successor
        wait_until(lambda: self.serves(successor), f"{name} serves again", START_DEADLINE_S)

    def stats(self, name: str) -> ServerStats:
        """Returns the stats; asks twice if needed, because on a loaded machine a connection may take longer
        than gRPC allows."""
        try:
            return super().stats(name)
        except grpc.RpcError:
            if not self[name].is_alive:
                raise
            return super().stats(name)

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

    def ticketed(self, router: str) -> None:
        """Returns once ``router`` has the tickets of all prompts that it has sent to prefill servers."""
        wait_until(lambda: not self._num_assigned(router), f"{router} has its tickets")

    def _num_assigned(self, router: str) -> float:
        """Returns how many tokens of the router's prompts are being computed on prefill servers."""
        return sum(
            value
            for name, value in self.metrics(router).items()
            if name.startswith("twinfang_assigned_tokens{") and 'role="prefill"' in name
        )


@contextlib.contextmanager
def running_fleet(folder: Path) -> Iterator[Fleet]:
    """Starts all processes; at the end each of them must stop cleanly."""
    with _running(folder, _ROUTERS, places={}, ucx_tls="^cma") as fleet:
        yield fleet


@contextlib.contextmanager
def running_fleet_in(network: Network, folder: Path) -> Iterator[Fleet]:
    """Starts the same servers on hosts of their own, which only TCP connects. The routers share a host."""
    places = {name: network.hosts[name] for name in _SERVERS}
    places |= dict.fromkeys(_NETWORK_ROUTERS, network.hosts[FRONT])
    with _running(folder, _NETWORK_ROUTERS, places=places, ucx_tls="tcp") as fleet:
        yield fleet


@contextlib.contextmanager
def _running(
    folder: Path, routers: dict[str, tuple[str, ...]], *, places: Mapping[str, Host], ucx_tls: str
) -> Iterator[Fleet]:
    faults = folder / "faults"
    faults.mkdir()
    token = folder / "admin-token"
    token.write_text(ADMIN_TOKEN)
    token.chmod(0o600)
    made = make_processes(
        folder,
        _SERVERS,
        routers,
        # With these flags tests know which server is next, and may kill servers that nobody starts again.
        router_flags=(
            *("--prefill-policy", "round_robin", "--decode-policy", "round_robin"),
            *("--hold-s", str(HOLD_S), "--admin-token-file", str(token)),
        ),
        server_module=slowed.MODULE,
        environment={"UCX_TLS": ucx_tls, FOLDER_VARIABLE: str(faults)},
        places=places,
    )
    fleet = Fleet(folder, *made, routers)
    for process in fleet.processes:
        if process.name in places:
            places[process.name].open_port(process.port)
    try:
        with running(fleet):
            yield fleet
    finally:
        fleet.clients.shutdown()
