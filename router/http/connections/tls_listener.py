"""Accepts connections that begin with a TLS handshake."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from router.http.connections.open_connections import OpenConnections, Place

log = logging.getLogger(__name__)

RETRY_S = 0.1
"""Pause after a connection that could not be accepted."""


class TlsListener:
    """Has the methods of asyncio's server that uvicorn needs. asyncio's own server shows a connection only
    after its handshake: until then nobody could count it, or close it."""

    def __init__(
        self,
        listening: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        connections: OpenConnections,
        *,
        limits: Mapping[str, float],
        at_once: int,
    ) -> None:
        """``listening`` listens already. ``limits``: times of asyncio's TLS. ``at_once``: the number of
        connections to accept in one iteration of the event loop."""
        self.sockets = (listening,)
        self._listening = listening
        self._make_protocol = make_protocol
        self._context = context
        self._connections = connections
        self._limits = limits
        self._at_once = at_once
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._listen()

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listening.fileno())
        self._listening.close()
        for handshake in self._handshakes:
            handshake.cancel()

    async def wait_closed(self) -> None:
        """Wait until no handshake is under way."""
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _listen(self) -> None:
        self._loop.add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(self._at_once):
            try:
                accepted, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("can't accept a connection: %s", error)
                self._loop.remove_reader(self._listening.fileno())
                self._retry = self._loop.call_later(RETRY_S, self._listen)
                return
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            place = self._connections.opened(address[0], partial(_end, accepted))
            handshake = self._loop.create_task(self._shake_hands(accepted, place))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, accepted: socket.socket, place: Place) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, accepted, ssl=self._context, **self._limits
            )
        except OSError as error:  # of TLS too
            log.debug("a TLS handshake failed: %s", error)
        finally:
            place.left()  # the protocol has a place of its own


def _end(accepted: socket.socket) -> None:
    """End both directions. The handshake sees the end of its input, and closes the socket."""
    with suppress(OSError):  # the client was faster
        accepted.shutdown(socket.SHUT_RDWR)
