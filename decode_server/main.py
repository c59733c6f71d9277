"""The decode server's process."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets

from decode_server.config import DecodeConfig
from decode_server.service import DecodeService
from telemetry.server_telemetry import ServerTelemetry
from telemetry.tracing import start_tracing
from wire.server import GrpcServer

log = logging.getLogger(__name__)


def run(config: DecodeConfig) -> None:
    """Serves until SIGTERM or SIGINT. Raises what made it unable to start or to go on."""
    asyncio.run(_serve(config))


async def _serve(config: DecodeConfig) -> None:
    server = GrpcServer(config.host, config.port)
    incarnation = secrets.token_hex(8)
    telemetry = ServerTelemetry(server, host=config.host, port=config.port, metrics_port=config.metrics_port)
    try:
        tracing = start_tracing(
            f"twinfang-{config.engine.role}",
            incarnation,
            endpoint=config.otlp_endpoint,
            environment=os.environ,
        )
        service = DecodeService(config, server, incarnation=incarnation, tracing=tracing)
        await _run(config, server, service, telemetry)
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
    finally:
        await telemetry.close()


async def _run(
    config: DecodeConfig, server: GrpcServer, service: DecodeService, telemetry: ServerTelemetry
) -> None:
    service.start()
    try:
        await server.start()
        telemetry.show(service.describe(), service.stats, service.measures)
        log.info("%s server ready on %s:%d", config.engine.role, config.host, server.port)
        await server.wait_until_stopped(service.drain)
    finally:
        await service.close()
