"""Messages of one stream that wait at the same time, sent as one.

gRPC's work for a message, in four threads, costs more than what most messages contain. While one message is
being written, further messages wait, and they leave together.
"""

from __future__ import annotations

import asyncio
from collections import deque

import msgpack

from wire.codec import decode, encode, message

MAX_BYTES = 256 << 10
"""Messages are added to one another only up to this many bytes."""


@message
class Gathered:
    """Several messages, each encoded as it would be alone."""

    messages: tuple[bytes, ...]


_NAME: bytes = msgpack.packb(Gathered.__name__)
"""It stands behind the envelope's first byte and that of the version."""


def messages_in(data: bytes) -> tuple[bytes, ...]:
    """Returns the messages in ``data``: those that were gathered, otherwise ``data`` itself.

    Raises :class:`WireError` if ``data`` looks gathered but can't be read.
    """
    return decode(data, Gathered).messages if data.startswith(_NAME, 2) else (data,)


class Outgoing:
    """The encoded messages that wait to be written to one stream. Used by one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._is_closed = False

    def put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._wake()

    def close(self) -> None:
        """Let :meth:`next` return None once nothing waits any more."""
        self._is_closed = True
        self._wake()

    async def next(self, *, not_before_s: float = 0.0) -> bytes | None:
        """Waits for a message. Returns it, together with others that wait; None after the last one.

        Until ``not_before_s``, on the event loop's clock, further messages may still join.
        """
        loop = asyncio.get_running_loop()
        while not self._waiting:
            if self._is_closed:
                return None
            self._reader = loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if (pause_s := not_before_s - loop.time()) > 0:
            await asyncio.sleep(pause_s)
        first = self._waiting.popleft()
        if not self._waiting or len(first) >= MAX_BYTES:
            return first
        together, num_bytes = [first], len(first)
        while self._waiting and num_bytes + len(self._waiting[0]) <= MAX_BYTES:
            together.append(self._waiting.popleft())
            num_bytes += len(together[-1])
        return first if len(together) == 1 else encode(Gathered(tuple(together)))

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
