"""Keeps a bidirectional stream to one server open."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Any, Protocol

import grpc
import grpc.aio

from router.fleet.links.server_connection import LOOK_INTERVAL_S, RETRY_INTERVAL_S, Connection
from router.fleet.links.server_drain import ServerDrain
from wire.errors import TwinfangError
from wire.gathered import Outgoing
from wire.messages.generation import ServerInfo

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.05
WRITE_INTERVAL_S = 0.002
"""A stream is written to at most once in this time. A request that comes after a quiet time leaves at once;
in a burst, requests leave together, because a write costs as much as everything else that a request needs
here."""


class StreamUser(Protocol):
    """Uses the stream. Its methods are called on the event loop, between those of other streams."""

    def opened(self, info: ServerInfo) -> None:
        """Take note that requests can be sent from now on."""

    async def received(self, data: bytes, info: ServerInfo) -> str:
        """Take a message from the server that said ``info`` when the stream was opened. Return why the stream
        can't be used any longer; empty if it can. Raises :class:`WireError` for an unreadable message."""

    def lost(self) -> None:
        """Take note that the stream has ended, and with it all its requests."""


class KeptStream:
    """Opens the stream again whenever it has ended, once the server says who it is."""

    def __init__(
        self,
        connection: Connection,
        drain: ServerDrain,
        user: StreamUser,
        *,
        path: str,
        probe_interval_s: float,
    ) -> None:
        """``path`` is that of the gRPC method."""
        self._connection = connection
        self._drain = drain
        self._user = user
        self._path = path
        self._look_interval_s = min(LOOK_INTERVAL_S, probe_interval_s)
        self._max_backoff_s = min(RETRY_INTERVAL_S, probe_interval_s)
        self._outgoing = Outgoing()
        self.info: ServerInfo | None = None
        """What the server said of itself. None without a stream. It stays while the server is only silent."""
        self.is_silent = False
        """Whether the server did not answer when it was last asked who it is, perhaps because it is frozen.
        Its requests may still be running."""

    def send(self, data: bytes) -> None:
        """Send a message; it is dropped if there is no stream."""
        if self.info is not None:
            self._outgoing.put(data)

    async def stay_connected(self) -> None:
        """Serve requests until the task is cancelled."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            num_wishes = self._drain.num_wishes
            info = await self._connection.describe()
            if info is not None:
                backoff_s = FIRST_BACKOFF_S
                self._drain.appeared(info, num_wishes=num_wishes)
                await self._drain.tell()
                await self._serve(info)
            await asyncio.sleep(backoff_s * random.uniform(0.75, 1.25))
            backoff_s = min(2 * backoff_s, self._max_backoff_s)

    async def _serve(self, info: ServerInfo) -> None:
        """Serve requests from the stream's opening to its end.

        A helper that fails ends the stream, and its error is raised: without a writer, requests would wait
        on a stream that looks well.
        """
        stream: Any = self._connection.channel.stream_stream(self._path)()
        self._outgoing = Outgoing()
        self.info, self.is_silent = info, False
        log.info("connected to %s server %s", info.role, self._connection.address)
        self._user.opened(info)
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(one) for one in (self._write(stream), self._keep_looking())]
                self._connection.failed(await self._why_ended(stream, info))
                for helper in helpers:
                    helper.cancel()
        finally:
            self.info = None
            stream.cancel()
            self._user.lost()

    async def _why_ended(self, stream: Any, info: ServerInfo) -> str:
        """Read messages until the stream can't be used any longer or has broken. Return the reason."""
        try:
            return await self._read(stream, info)
        except grpc.aio.AioRpcError as error:
            return f"the stream broke: {error.code().name}: {error.details()}"
        except TwinfangError as error:
            return f"it sent a message that can't be read: {error.message}"

    async def _read(self, stream: Any, info: ServerInfo) -> str:
        while (data := await stream.read()) is not grpc.aio.EOF:
            self._heard()
            if problem := await self._user.received(data, info):
                return problem
        return "it ended the stream"

    def _heard(self) -> None:
        """Note that the server has sent something. A server that was silent can be used again at once,
        because requests that failed while it was frozen are tried again now."""
        self._connection.heard()
        if self.is_silent:
            self.is_silent = False
            self._connection.succeeded()

    async def _keep_looking(self) -> None:
        """Ask the server who it is whenever it has sent nothing for a while, and while it is silent."""
        while True:
            quiet_s = time.monotonic() - self._connection.heard_s
            # The stats of a server that was silent come more often than this, and end no silence.
            if quiet_s < self._look_interval_s and not self.is_silent:
                await asyncio.sleep(self._look_interval_s - quiet_s)
                continue
            self.is_silent = await self._connection.look() is None
            if self.is_silent:
                await asyncio.sleep(self._look_interval_s)

    async def _write(self, stream: Any) -> None:
        loop, not_before_s = asyncio.get_running_loop(), 0.0
        try:
            while (data := await self._outgoing.next(not_before_s=not_before_s)) is not None:
                await stream.write(data)
                not_before_s = loop.time() + WRITE_INTERVAL_S
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            address = self._connection.address
            log.debug("stream to %s: no more writing: %s", address, error)  # the reader sees it too
