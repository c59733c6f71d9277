"""The HTTP server of one router process: uvicorn, with a drain before its end."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import ssl
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from router.config import RouterConfig
from router.http.connection import HttpConnection
from router.http.connections.tls_listener import TlsListener
from router.http.drain import Drain
from router.http.lingering import MAX_DRAIN_S
from wire.errors import UnavailableError

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""How long an idle connection is kept. This is longer than common clients keep idle connections in their
pools, so that the client closes the connection first."""

BACKLOG = 2048
"""The maximum number of connections that the operating system keeps until the router accepts them."""
ACCEPTED_AT_ONCE = 16
"""The number of connections that are accepted in one iteration of the event loop. libuv accepts one for each
handle that listens, so there are as many handles. With one handle, a probe that arrives after two hundred
other connections waits for two hundred iterations."""

HANDSHAKE_S = 10.0
"""How long a client may take for a TLS handshake."""
TLS_LIMITS = {"ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": MAX_DRAIN_S}
"""The second: how long a client may still send after the last answer. TLS has its own way to end only one
direction, with which asyncio waits for the client's end."""

CUT = (
    "this router stopped before the answer was finished: send the request again, and another router will "
    "take it"
)


class HttpServer(uvicorn.Server):
    """uvicorn's server, with a drain. The first SIGTERM or SIGINT begins the drain: the port stays open and
    answers new requests and ``/readyz`` with 503, until the running requests have ended or
    ``shutdown_grace_s`` is over. The second signal ends this time: what still runs is told so, as at the end
    of the grace. The third ends the process without a word."""

    def __init__(self, app: FastAPI, config: RouterConfig, drain: Drain) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                http=HttpConnection,
                h11_max_incomplete_event_size=config.max_header_bytes,
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_S,
                proxy_headers=bool(config.forwarded_allow_ips),
                forwarded_allow_ips=list(config.forwarded_allow_ips),
                timeout_graceful_shutdown=math.ceil(config.shutdown_grace_s),
            )
        )
        self._drain = drain
        self._state = app.state
        self._tls: ssl.SSLContext | None = app.state.tls
        self._own_port = None if config.place is None else config.place.own_port
        """Only the router's processes use this port, on loopback."""
        self._own_tls: ssl.SSLContext | None = app.state.own_ports.served
        self._grace_s = config.shutdown_grace_s
        self._has_told = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.ssl = self._tls
        await super().startup(sockets)
        has_started, self.started = self.started, False
        bound, self.servers = self.servers, []
        for server in bound:
            for listening in server.sockets:
                self.servers += await self._accept_on(listening)
            server.close()  # uvicorn's own handle has no limits for TLS; the socket stays open in the others
        self.started = has_started

    async def _accept_on(self, listening: socket.socket) -> list[Any]:
        """Return the servers that accept connections on copies of a socket."""
        tls = self._own_tls if listening.getsockname()[1] == self._own_port else self._tls
        if tls is not None:
            copy, connections = socket.socket(fileno=os.dup(listening.fileno())), self._state.connections
            limits, at_once = TLS_LIMITS, ACCEPTED_AT_ONCE
            return [TlsListener(copy, self._protocol, tls, connections, limits=limits, at_once=at_once)]
        loop = asyncio.get_running_loop()
        copies = [socket.socket(fileno=os.dup(listening.fileno())) for _ in range(ACCEPTED_AT_ONCE)]
        return [await loop.create_server(self._protocol, sock=copy, backlog=BACKLOG) for copy in copies]

    def _protocol(self) -> asyncio.Protocol:
        return HttpConnection(self.config, self.server_state, self.lifespan.state)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.started or self.should_exit:
            super().handle_exit(sig, frame)
            return
        self._captured_signals.append(sig)
        if self._drain.has_begun:
            self._grace_s = 0.0
        self._drain.begin()

    async def on_tick(self, counter: int) -> bool:
        """Decide whether to stop; called ten times a second. Return True to stop listening and end the
        requests that are left."""
        if self._drain.has_begun and not self._has_told:
            self._has_told = True
            log.info(
                "draining: %d requests have up to %g s to end; a second signal ends them at once",
                *(self._drain.num_running, self._grace_s),
            )
        if self._drain.is_over(self._grace_s) and not self.should_exit:
            log.info("drained: %d requests are left", self._drain.num_running)
            self._state.services.requests.abort_all(UnavailableError.told(CUT))
            self.config.timeout_graceful_shutdown = 1  # seconds that idle connections and event streams get
            self.should_exit = True
        return await super().on_tick(counter)
