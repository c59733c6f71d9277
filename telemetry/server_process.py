"""Runs the process of a prefill or decode server, from opening its ports to sending its last trace span."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from typing import TYPE_CHECKING, Protocol

from telemetry.engine_metrics import Measures
from telemetry.process_end import (
    DEVICE_FAULT_EXIT_CODE,
    FAULT_EXIT_CODE,
    leave_at_once,
    leave_within,
)
from telemetry.server_telemetry import ServerTelemetry
from telemetry.start_up import StartUp
from telemetry.tracing import start_tracing
from wire.errors import DeviceFaultError
from wire.messages.generation import ServerInfo, ServerStats
from wire.open_files import raise_open_file_limit
from wire.server import GrpcServer

if TYPE_CHECKING:
    from telemetry.otel import Tracing
    from wire.tls.identity import Identity
    from wire.tls.identity_files import IdentityFiles

log = logging.getLogger(__name__)

FAULT_GRACE_S = 15.0
"""Time for a clean stop after a fault. A thread that waits for a rank which is gone may never come back."""


class ServerConfig(Protocol):
    """The settings of a server that its process needs."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def metrics_port(self) -> int | None: ...
    @property
    def vllm_metrics(self) -> bool: ...
    @property
    def identity(self) -> IdentityFiles | None: ...
    @property
    def otlp_endpoint(self) -> str: ...


class Service(Protocol):
    """The object that does the work of a server. It adds its calls to the gRPC server by itself. The caller
    starts it after its creation."""

    @property
    def measures(self) -> Measures: ...
    def start(self) -> None: ...
    def describe(self) -> ServerInfo: ...
    def hang(self) -> str | None:
        """Return what hangs, or None. Called on other threads than the event loop's."""

    async def stats(self) -> ServerStats: ...
    async def drain(self) -> None:
        """Hand requests under way to other servers. Awaited when the process is told to stop."""

    async def close(self) -> None: ...


class MakeService(Protocol):
    """Makes the service that answers the calls to ``server``."""

    def __call__(
        self, server: GrpcServer, *, incarnation: str, tracing: Tracing | None, start_up: StartUp
    ) -> Service: ...


def run_server(config: ServerConfig, role: str, make_service: MakeService) -> None:
    """Serve until SIGTERM or SIGINT. Raises the error because of which the server could not start or had to
    stop. After a fault of its device the process ends here, with exit code 71."""
    signal.signal(signal.SIGINT, _interrupt)
    raise_open_file_limit()
    asyncio.run(_serve(config, role, make_service))


def _interrupt(_signum: int, _frame: object) -> None:
    """Handle Ctrl-C while the server starts. Asyncio's own handler would let the start continue until its
    next await, which may be half an hour away if the server waits for other hosts."""
    raise KeyboardInterrupt


async def _serve(config: ServerConfig, role: str, make_service: MakeService) -> None:
    start_up = StartUp.of_process()
    start_up.ended("imports")
    identity = _identity(config.identity)
    server = GrpcServer(config.host, config.port, identity)
    incarnation = secrets.token_hex(8)
    telemetry = ServerTelemetry(
        server,
        host=config.host,
        port=config.port,
        metrics_port=config.metrics_port,
        vllm_metrics=config.vllm_metrics,
        identity=identity,
    )
    try:
        endpoint = config.otlp_endpoint
        tracing = start_tracing(f"twinfang-{role}", incarnation, endpoint=endpoint, environment=os.environ)
        service = make_service(server, incarnation=incarnation, tracing=tracing, start_up=start_up)
        service.start()
        try:
            await server.start()
            start_up.ended("server")
            telemetry.show(service.describe(), service.stats, service.measures, start_up, service.hang)
            log.info("%s server ready on %s:%d after %s", role, config.host, server.port, start_up)
            await server.wait_until_stopped(service.drain)
        except DeviceFaultError:
            # Whoever noticed the fault has logged it, and all calls have ended. Closing the service would
            # wait for the GPU.
            leave_at_once(DEVICE_FAULT_EXIT_CODE)
        except Exception:
            leave_within(FAULT_GRACE_S, FAULT_EXIT_CODE)
            raise
        finally:
            await service.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
    except DeviceFaultError:  # while the service was made
        leave_at_once(DEVICE_FAULT_EXIT_CODE)
    finally:
        await telemetry.close()


def _identity(files: IdentityFiles | None) -> Identity | None:
    """Return the identity for mutual TLS. Its library takes a while to import, which a server without TLS is
    spared. Raises :class:`ConfigError`."""
    if files is None:
        return None
    from wire.tls.identity import Identity

    return Identity(files, "server")
