"""Runs one gRPC server process: binds, becomes ready, stops cleanly on a signal or a fault."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from wire.errors import ConfigError
from wire.health import Health
from wire.http.address import host_port
from wire.messages.generation import Empty, ServerInfo, ServerStats, SetDraining
from wire.messages.prefixes import GetPrefixes, PrefixNews
from wire.messages.purge import PurgeNews, PurgePrefixes
from wire.messages.sessions import SessionNews, TendSession
from wire.rpc import (
    DESCRIBE,
    GET_PREFIXES,
    GET_STATS,
    PURGE,
    SERVER_OPTIONS,
    SERVER_SERVICE,
    SET_DRAINING,
    TEND_SESSION,
    service,
    unary_handler,
)

if TYPE_CHECKING:
    from wire.callers import Callers
    from wire.tls.identity import Identity

log = logging.getLogger(__name__)

DRAIN_S = 8.0
"""Maximum time that a process waits, after it is told to stop, until other servers have read the state of its
requests or have taken the requests over."""
DRAIN_POLL_S = 0.02
STOP_GRACE_S = 2.0
"""How long calls in progress may take when the server stops, before they are cut."""
CALLERS_INTERVAL_S = 1.0
FAULT_GRACE_S = 0.2
"""The same after a fault. Nothing more is computed; this is for outputs that wait to be sent."""


class GrpcServer:
    """A grpc.aio server with the standard health service and the calls that every server answers.

    The port is bound at once, so that a port conflict is found before a model is loaded. Calls are answered
    once :meth:`start` has run.
    """

    def __init__(self, host: str, port: int, identity: Identity | None = None) -> None:
        """``identity``: for mutual TLS. None: callers are not authenticated, and nothing is encrypted."""
        self.identity = identity
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._callers = None if identity is None else _callers(identity)
        self.health = Health(self._server)
        try:
            self.port = self._listen(host_port(host, port))
        except RuntimeError as error:
            raise ConfigError(f"can't listen on {host}:{port}: {error}; choose another `port`") from error
        self._stopping = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._fault: BaseException | None = None
        self._failed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    def _listen(self, address: str) -> int:
        if self._callers is None:
            return int(self._server.add_insecure_port(address))
        return int(self._server.add_secure_port(address, self._callers.credentials()))

    def add_service(self, name: str, handlers: dict[str, grpc.RpcMethodHandler[Any, Any]]) -> None:
        if self._callers is not None:
            handlers = self._callers.guarded(name, handlers)
        self._server.add_generic_rpc_handlers((service(name, handlers),))
        self.health.add_service(name)

    def add_server_service(
        self,
        describe: Callable[[], ServerInfo],
        stats: Callable[[], Awaitable[ServerStats]],
        prefix_news: Callable[[int | None], Awaitable[PrefixNews]],
        set_draining: Callable[[SetDraining], Awaitable[None]],
        tend_session: Callable[[TendSession], Awaitable[SessionNews]],
        purge: Callable[[PurgePrefixes], Awaitable[PurgeNews]],
    ) -> None:
        """Adds Describe, GetStats, GetPrefixes, SetDraining, TendSession and Purge, which every server
        answers."""

        async def on_describe(_request: Any, _context: Any) -> ServerInfo:
            return describe()

        async def on_stats(_request: Any, _context: Any) -> ServerStats:
            return await stats()

        async def on_prefixes(request: GetPrefixes, _context: Any) -> PrefixNews:
            return await prefix_news(request.since)

        async def on_draining(request: SetDraining, _context: Any) -> Empty:
            await set_draining(request)
            return Empty()

        async def on_session(request: TendSession, _context: Any) -> SessionNews:
            return await tend_session(request)

        async def on_purge(request: PurgePrefixes, _context: Any) -> PurgeNews:
            return await purge(request)

        handlers = {
            PURGE.name: unary_handler(PURGE, on_purge),
            TEND_SESSION.name: unary_handler(TEND_SESSION, on_session),
            SET_DRAINING.name: unary_handler(SET_DRAINING, on_draining),
            DESCRIBE.name: unary_handler(DESCRIBE, on_describe),
            GET_STATS.name: unary_handler(GET_STATS, on_stats),
            GET_PREFIXES.name: unary_handler(GET_PREFIXES, on_prefixes),
        }
        self.add_service(SERVER_SERVICE, handlers)

    async def start(self) -> None:
        """Answers calls from now on and reports itself as serving."""
        if self.identity is not None:
            self._watching = asyncio.create_task(self._watch(self.identity))
            self._watching.add_done_callback(self._watch_ended)
        await self._server.start()
        await self.health.set("serving")

    async def _watch(self, identity: Identity) -> None:
        """Uses new certificates, until this task is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(identity.watch())
            while True:
                await asyncio.sleep(CALLERS_INTERVAL_S)
                assert self._callers is not None
                self._callers.tell_refused()

    def _watch_ended(self, watching: asyncio.Task[None]) -> None:
        if not watching.cancelled() and (error := watching.exception()) is not None:
            self.fail(error)

    def stop(self) -> None:
        """Ends the process as SIGTERM does. May be called from any thread."""
        self._loop.call_soon_threadsafe(self._stopping.set)

    def stop_with(self, other: str) -> None:
        """Like :meth:`stop`, because ``other`` is about to stop and this process can't go on without it."""
        log.info("%s stops, and so does this one", other)
        self.stop()

    def fail(self, fault: BaseException) -> None:
        """Ends the process with ``fault``, or with the first of several faults. May be called from any
        thread."""
        self._fault = self._fault or fault
        self._loop.call_soon_threadsafe(self._failed.set)
        self._loop.call_soon_threadsafe(self._stopping.set)

    async def wait_until_stopped(self, drain: Callable[[], Awaitable[None]] | None = None) -> None:
        """Waits for SIGTERM, SIGINT, :meth:`stop` or :meth:`fail`, then ends calls and returns.

        Raises the fault given to :meth:`fail`. ``drain`` finishes requests under way or passes them to other
        servers, and ends calls that would never end by themselves, such as streams. It is not called after a
        fault: there is nothing left to pass on. A fault also ends a drain, which could wait for an engine
        that has failed.
        """
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(signum, self._stopping.set)
        await self._stopping.wait()
        await self.health.set("stopping")
        if drain is not None and self._fault is None:
            await self._drain(drain)
        self.health.close()
        await self._server.stop(STOP_GRACE_S if self._fault is None else FAULT_GRACE_S)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._fault is not None:
            raise self._fault

    async def _drain(self, drain: Callable[[], Awaitable[None]]) -> None:
        draining, failed = asyncio.ensure_future(drain()), asyncio.ensure_future(self._failed.wait())
        try:
            await asyncio.wait({draining, failed}, return_when=asyncio.FIRST_COMPLETED)
            if draining.done():
                draining.result()
        finally:
            draining.cancel()
            failed.cancel()


def _callers(identity: Identity) -> Callers:
    """Returns who may call. The library for certificates takes a while to import, which a server without TLS
    is spared."""
    from wire.callers import Callers

    return Callers(identity)
