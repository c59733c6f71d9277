"""The link between rank 0 and another rank. Any thread may send whole messages in both directions.

The link to a rank on the same host is a pipe, the link to a rank on another host a TCP connection.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

from wire.codec import decode, encode
from wire.messages.ranks import RankLog

T = TypeVar("T")


class RankLink:
    """One end of a link.

    Sending and receiving raise :class:`EOFError` or :class:`OSError` if the other end is gone.
    """

    def __init__(self, connection: Connection) -> None:
        self.takers: dict[type, Callable[[object], None]] = {}
        """Handlers for messages that may come at any time from any thread of the other end. The key is the
        message's type."""
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def over(cls, connection: socket.socket) -> RankLink:
        """Makes a link over a connected socket. The socket belongs to the link from then on."""
        connection.setblocking(True)
        return cls(Connection(connection.detach()))

    def send(self, message: object) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        with self._lock:
            self._connection.send_bytes(data)

    def receive(self, *expected: type[T]) -> T:
        """Waits for the next message."""
        return decode(self._connection.recv_bytes(), *expected)


class RankLogHandler(logging.Handler):
    """Sends a rank's log lines to the process that started the rank, which writes them to its own log."""

    def __init__(self, link: RankLink) -> None:
        super().__init__()
        self._link = link
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._link.send(RankLog(record.levelno, record.name, self.format(record)))
        except OSError:  # the process that started this rank is gone, and the rank is about to end
            print(self.format(record), file=sys.stderr, flush=True)
