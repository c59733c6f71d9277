"""The end of a connection whose client may still be sending."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

MAX_DRAIN_BYTES = 64 << 20
MAX_DRAIN_S = 10.0
"""What a client may still send behind an answer, in bytes and in time, before the connection is closed.

Reading and dropping costs next to nothing; a client that is cut off while it sends loses its answer."""


class LingeringTransport:
    """A connection's transport that can be closed without losing the last answer.

    A socket that is closed with unread bytes in it resets the connection, and the client may lose what was
    sent to it. A client that sends on for ever must not keep the connection either. So :meth:`close` first
    says that no more comes, reads and drops for a bounded time, then closes. Where ``may_send`` says that
    nothing is on its way it closes at once.
    """

    def __init__(self, transport: asyncio.Transport, may_send: Callable[[], bool]) -> None:
        self._transport = transport
        self._may_send = may_send
        self._timer: asyncio.TimerHandle | None = None
        self._num_bytes = 0
        self.write = transport.write
        """The transport's own: streams call it for each token."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def lingers(self) -> bool:
        return self._timer is not None

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if not (self._may_send() and self._transport.can_write_eof()):
            self._transport.close()
            return
        self._timer = asyncio.get_running_loop().call_later(MAX_DRAIN_S, self._transport.abort)
        self._transport.write_eof()
        self._transport.resume_reading()

    def drop(self, num_bytes: int) -> None:
        """Takes note of bytes that came while it lingers."""
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_DRAIN_BYTES:
            self._transport.abort()

    def lost(self) -> None:
        """The connection has gone."""
        if self._timer is not None:
            self._timer.cancel()
        del self._may_send  # its owner has this transport
