"""What a router knows of one server and asks of it. This is the same for prefill and decode servers."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Literal

from router.background import OnFatal, cancel_and_wait, start_background
from router.fleet.links.assignments import Assignments
from router.fleet.links.kept_stream import KeptStream
from router.fleet.links.server_connection import Connection, MayConnect
from router.fleet.links.server_drain import ServerDrain
from router.policies.location import Location
from wire.channels import Channels
from wire.errors import UnavailableError
from wire.messages.generation import ServerInfo, ServerStats
from wire.messages.handoff import Role
from wire.messages.prefixes import PrefixNews
from wire.messages.purge import PurgeNews, PurgePrefixes
from wire.messages.sessions import SessionNews, TendSession
from wire.rpc import open_channel

PoolRole = Literal["prefill", "decode"]
"""The pool that a server is in. A server that does both is in the pool of decode servers."""
ROLES: dict[PoolRole, tuple[Role, ...]] = {"prefill": ("prefill", "both"), "decode": ("decode", "both")}
"""The roles that servers of a pool may report."""
AddedBy = Literal["flag", "api", "discovery"]


def worker_id(role: PoolRole, address: str) -> str:
    """Return an id like ``decode-1a2b3c``: the same for one address on every router and after every
    restart."""
    return f"{role}-{hashlib.blake2b(address.encode(), digest_size=3).hexdigest()}"


RESTARTED = "it was restarted while this router connected to it"


class ServerLink:
    """One server of a pool: its connection, its drain, and this router's work there."""

    _stream: KeptStream

    def __init__(
        self,
        pool_role: PoolRole,
        address: str,
        *,
        served_models: frozenset[str] | None,
        may_connect: MayConnect,
        probe_interval_s: float,
        added_by: AddedBy,
        location: Location,
        channels: Channels = open_channel,
    ) -> None:
        self.pool_role = pool_role
        self.address = address
        self.location = location
        self.added_by = added_by
        self.worker_id = worker_id(pool_role, address)
        self.assignments = Assignments(time.monotonic)
        self._connection = Connection(
            address, ROLES[pool_role], served_models, may_connect=may_connect, channels=channels
        )
        self.drain = ServerDrain(self._connection)
        self._probe_interval_s = probe_interval_s
        self._tasks: list[asyncio.Task[None]] = []
        self._tending: set[asyncio.Task[None]] = set()

    @property
    def info(self) -> ServerInfo | None:
        """None while the server can't be used: it does not answer, says that it does not serve, or is held
        back."""
        connection, stream = self._connection, self._stream
        if stream.is_silent or not connection.is_serving or connection.held_back:
            return None
        return stream.info

    @property
    def last_info(self) -> ServerInfo | None:
        """What the server last said of itself, whether or not it can be used now. None if it never said
        anything."""
        return self._connection.last_info

    @property
    def is_connected(self) -> bool:
        """Whether the server has said who it is, even if it is not in use."""
        return self._stream.info is not None

    @property
    def serves_other_release(self) -> bool:
        """Whether the server takes requests, but only from routers of another release."""
        return self._connection.is_usable and self._connection.speaks_other_protocol

    @property
    def problem(self) -> str:
        return self._connection.problem

    def hold_back(self, why: str) -> None:
        """Send no new requests to the server, for the reason ``why``. With an empty ``why``, use the server
        again."""
        self._connection.held_back = why

    async def stats(self) -> ServerStats | None:
        """Return the server's own stats. None without a connection, or without an answer in time."""
        return None if self._stream.info is None else await self._connection.stats()

    async def prefix_news(self, since: int | None) -> PrefixNews | None:
        """Return which prefixes the server's cache can serve: all of them, or the changes since version
        ``since``. None without a connection or an answer."""
        return None if self._stream.info is None else await self._connection.prefix_news(since)

    async def tend_session(self, wanted: TendSession) -> SessionNews | None:
        """Let the server do something with a session's starts. None without a connection or an answer."""
        return None if self._stream.info is None else await self._connection.tend_session(wanted)

    async def purge(self, wanted: PurgePrefixes) -> PurgeNews:
        """Let the server delete cached prompts. Raises :class:`TwinfangError` if it has not done so."""
        if self._stream.info is None or self._stream.is_silent:
            raise UnavailableError.told(self.problem or "it does not answer")
        return await self._connection.purge(wanted)

    def tend_soon(self, wanted: TendSession) -> None:
        """In the background, let the server do something with a session's starts."""
        task = asyncio.create_task(self._tend_session(wanted))
        self._tending.add(task)
        task.add_done_callback(self._tending.discard)

    async def _tend_session(self, wanted: TendSession) -> None:
        await self.tend_session(wanted)

    def start(self, on_fatal: OnFatal) -> None:
        """Stay connected, and follow the server's health, until the link is closed."""
        name = f"{self.pool_role} server {self.address}"
        health = self._connection.keep_health(self._probe_interval_s)
        self._tasks = [
            start_background(self._stream.stay_connected(), f"stream to {name}", on_fatal),
            start_background(health, f"health of {name}", on_fatal),
        ]

    async def close(self) -> None:
        await cancel_and_wait(*self._tasks, *self._tending)
        await self._connection.close()
