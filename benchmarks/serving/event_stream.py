"""A client's connection for streamed answers, cheap enough to share two cores with the measured servers.

HTTP/1.1 over an asyncio protocol: data is unchunked, cut into server-sent events and passed on at once. An
event costs about 10 µs of CPU; a general client needs 100.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from urllib.parse import urlsplit

OnEvent = Callable[[bytes, float], None]
"""Gets an event without the blank line after it, and its time (``time.perf_counter``)."""


REFUSALS = (b"HTTP/1.1 429", b"HTTP/1.1 503")
_ROOM_BYTES = 64 << 10
"""Read at a time. Without room of its own a connection gets 256 KiB from the system for each read, and gives
them back: that took longer than all the rest."""


class StreamError(Exception):
    """A request failed, or the connection broke."""


class RefusedError(StreamError):
    """The server has too many requests. The connection cannot be used again."""


class _ClosedError(StreamError):
    """The server closed the connection."""


class EventStream(asyncio.BufferedProtocol):
    """One connection, for one request after another.

    A server may close a connection between two requests, and may do so while the next one is on its way. That
    request is sent once more, on a new connection.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host, self._address = parts.netloc, (parts.hostname, parts.port or 80)
        self._is_used = False
        self.is_open = False
        self._ended: asyncio.Future[None] | None = None
        self._on_event: OnEvent = lambda event, now: None
        self._room = bytearray(_ROOM_BYTES)
        self._begin()

    @classmethod
    async def connect(cls, url: str) -> EventStream:
        """Raises :class:`OSError`."""
        stream = cls(url)
        await stream._connect()
        return stream

    async def _connect(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self, *self._address)
        self.is_open, self._is_used = True, False

    async def post(self, path: str, body: object, on_event: OnEvent, timeout_s: float) -> None:
        """Sends a request; returns at the answer's end. Raises :class:`StreamError`, and
        :class:`TimeoutError`."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        self._on_event = on_event
        async with asyncio.timeout(timeout_s):
            try:
                await self._send(request)
            except OSError as error:
                raise StreamError(f"no new connection: {error}") from error
        self._is_used = True

    async def _send(self, request: bytes) -> None:
        if not self.is_open:
            await self._connect()
        try:
            await self._answer_to(request)
        except _ClosedError:
            if not self._is_used or self._has_head or self._unread:
                raise
            await self._connect()
            await self._answer_to(request)

    async def _answer_to(self, request: bytes) -> None:
        self._begin()
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._ended

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._fail(f"the connection broke: {exc or 'closed by the server'}", _ClosedError)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        now = time.perf_counter()
        self._unread += self._room[:nbytes]
        if not self._has_head and not self._read_head():
            return
        while (line_end := self._unread.find(b"\r\n")) >= 0:
            size = int(self._unread[:line_end].partition(b";")[0], 16)
            end = line_end + 2 + size
            if len(self._unread) < end + 2:
                return
            self._body += self._unread[line_end + 2 : end]
            self._unread = self._unread[end + 2 :]
            if size == 0:
                self._end()
                return
            *events, self._body = self._body.split(b"\n\n")
            for event in events:
                self._on_event(event, now)

    def _begin(self) -> None:
        self._unread: bytes = b""
        self._body: bytes = b""
        self._has_head = False

    def _read_head(self) -> bool:
        head, blank, rest = self._unread.partition(b"\r\n\r\n")
        if not blank:
            return False
        lower = head.lower()
        if not head.startswith(b"HTTP/1.1 200") or b"transfer-encoding: chunked" not in lower:
            kind = RefusedError if head.startswith(REFUSALS) else StreamError
            self._fail(f"answered with {self._unread[:600].decode(errors='replace')}", kind)
            return False
        self._has_head, self._unread = True, rest
        return True

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, reason: str, kind: type[StreamError] = StreamError) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(kind(reason))
