"""What a router knows of one server and asks of it, whatever the server is for."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Coroutine
from typing import Literal

from router.background import OnFatal, cancel_and_wait, start_background
from router.fleet.links.assignments import Assignments
from router.fleet.links.server_connection import Connection, MayConnect
from router.fleet.links.server_drain import ServerDrain
from wire.messages.generation import ServerInfo, ServerStats
from wire.messages.handoff import Role
from wire.messages.prefixes import PrefixNews

PoolRole = Literal["prefill", "decode"]
"""The pool that a server is in. A server that does both stands in that of decode servers."""
ROLES: dict[PoolRole, tuple[Role, ...]] = {"prefill": ("prefill", "both"), "decode": ("decode", "both")}
"""What servers of a pool may say that they are."""
AddedBy = Literal["flag", "api", "discovery"]


def worker_id(role: PoolRole, address: str) -> str:
    """The same for one address on every router and after every restart: ``decode-1a2b3c``."""
    return f"{role}-{hashlib.blake2b(address.encode(), digest_size=3).hexdigest()}"


class ServerLink:
    """One server of a pool: its connection, whether it drains, what this router has under way there."""

    def __init__(
        self,
        pool_role: PoolRole,
        address: str,
        *,
        served_models: frozenset[str] | None,
        may_connect: MayConnect,
        probe_interval_s: float,
        added_by: AddedBy,
    ) -> None:
        self.pool_role = pool_role
        self.address = address
        self.added_by = added_by
        self.worker_id = worker_id(pool_role, address)
        self.assignments = Assignments(time.monotonic)
        self._connection = Connection(address, ROLES[pool_role], served_models, may_connect=may_connect)
        self.drain = ServerDrain(self._connection)
        self._probe_interval_s = probe_interval_s
        self._info: ServerInfo | None = None
        """None as long as the server does not answer; of one that streams, as long as there is no stream."""
        self._is_silent = False
        """Whether it was asked in vain who it is: frozen, maybe. What it has under way may still come."""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def info(self) -> ServerInfo | None:
        """None as long as the server can't be used: it does not answer, or it says that it does not serve."""
        return self._info if self._connection.is_usable and not self._is_silent else None

    @property
    def last_info(self) -> ServerInfo | None:
        """What it said last, whether or not it can be used now; None: nothing yet."""
        return self._connection.last_info

    @property
    def is_connected(self) -> bool:
        """Whether it has said who it is, used or not."""
        return self._info is not None

    @property
    def problem(self) -> str:
        return self._connection.problem

    def hold_back(self, why: str) -> None:
        """Sends nothing new there as long as there is a reason; an empty one ends that."""
        self._connection.held_back = why

    async def stats(self) -> ServerStats | None:
        """The server's own figures; None without a connection, or an answer in time."""
        return None if self._info is None else await self._connection.stats()

    async def prefix_news(self, since: int | None) -> PrefixNews | None:
        """What its cache can serve; None without a connection or an answer."""
        return None if self._info is None else await self._connection.prefix_news(since)

    def _keep(self, watch: Coroutine[None, None, None], name: str, on_fatal: OnFatal) -> None:
        """Runs ``watch``, and follows the server's health, until the link is closed."""
        health = self._connection.keep_health(self._probe_interval_s)
        self._tasks = [start_background(task, name, on_fatal) for task in (watch, health)]

    async def _end_tasks(self) -> None:
        await cancel_and_wait(*self._tasks)
