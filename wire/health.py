"""gRPC's standard health service (``grpc.health.v1``), server and client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Literal

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

ServerState = Literal["starting", "serving", "draining", "stopping"]

_STATUS = health_pb2.HealthCheckResponse


class Health:
    """A server's reported health: for the whole server (the service with the empty name) and each service.

    All states except ``serving`` are reported as NOT_SERVING. A draining server may serve again; a stopping
    server never does.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self.state: ServerState = "starting"
        """May be read from any thread."""
        self._services = [""]
        self._servicer = _Servicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def add_service(self, name: str) -> None:
        """Adds a service. Its health is always that of the server. Call this before :meth:`set`."""
        self._services.append(name)

    async def set(self, state: ServerState) -> None:
        """Sets the state and reports it to the clients that watch."""
        if self.state == "stopping":
            return
        self.state = state
        status = _STATUS.SERVING if state == "serving" else _STATUS.NOT_SERVING
        for name in self._services:
            await self._servicer.set(name, status)

    def close(self) -> None:
        """Ends the calls of clients that watch, since a server that stops would wait for these calls."""
        self._servicer.closed.set()


class _Servicer(health.aio.HealthServicer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.closed = asyncio.Event()

    async def Watch(self, request: Any, context: Any) -> None:
        watching = asyncio.ensure_future(super().Watch(request, context))
        closed = asyncio.ensure_future(self.closed.wait())
        try:
            await asyncio.wait({watching, closed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (watching, closed):
                task.cancel()
            await asyncio.gather(watching, closed, return_exceptions=True)


async def watch_health(channel: grpc.aio.Channel) -> AsyncGenerator[bool, None]:
    """Yields at once, and then on every change, whether the server at the other end serves.

    Ends when the stream ends, for any reason. For a server without the health service it yields nothing.
    """
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    try:
        async for reply in watch:
            yield reply.status == _STATUS.SERVING
    except grpc.aio.AioRpcError:
        return
    finally:
        watch.cancel()
