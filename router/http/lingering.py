"""Closes a connection whose client may still be sending."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

MAX_DRAIN_BYTES = 64 << 20
MAX_DRAIN_S = 10.0
"""How many bytes (:data:`MAX_DRAIN_BYTES`), and for how long, a client may still send after an answer, before
the connection is closed.

Reading and dropping these bytes costs very little. Without it, a client that still sends would be cut off and
lose its answer."""


class LingeringTransport:
    """A connection's transport that can be closed without losing the last answer.

    Closing a socket that has unread bytes resets the connection, and the client may lose what was sent to it.
    But a client that never stops sending must not keep the connection. So :meth:`close` first ends the
    router's sending side, then reads and drops what the client sends for a limited time, and then closes the
    connection. If ``may_send`` says that the client sends nothing any more, :meth:`close` closes the
    connection at once.
    """

    def __init__(self, transport: asyncio.Transport, may_send: Callable[[], bool]) -> None:
        self._transport = transport
        self._may_send = may_send
        self._timer: asyncio.TimerHandle | None = None
        self._num_bytes = 0
        self.write = transport.write
        """The transport's own method, with no other call in between, because streams call it for each
        token."""

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
        """Count bytes that came while the connection lingers; abort it if there are too many."""
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_DRAIN_BYTES:
            self._transport.abort()

    def lost(self) -> None:
        """Clean up after the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()
        del self._may_send  # breaks a reference cycle: the function's owner refers to this transport
