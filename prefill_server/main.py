"""The prefill server's process."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets

from prefill_server.config import PrefillConfig
from prefill_server.service import PrefillService
from telemetry.server_telemetry import ServerTelemetry
from telemetry.tracing import start_tracing
from wire.server import GrpcServer

log = logging.getLogger(__name__)


def run(config: PrefillConfig) -> None:
    """Serves until SIGTERM or SIGINT. Raises what made it unable to start or to go on."""
    asyncio.run(_serve(config))


async def _serve(config: PrefillConfig) -> None:
    server = GrpcServer(config.host, config.port)
    incarnation = secrets.token_hex(8)
    telemetry = ServerTelemetry(server, host=config.host, port=config.port, metrics_port=config.metrics_port)
    try:
        tracing = start_tracing(
            "twinfang-prefill",
            incarnation,
            endpoint=config.otlp_endpoint,
            environment=os.environ,
        )
        service = PrefillService(config, server, incarnation=incarnation, tracing=tracing)
        await _run(config, server, service, telemetry)
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
    finally:
        await telemetry.close()


async def _run(
    config: PrefillConfig, server: GrpcServer, service: PrefillService, telemetry: ServerTelemetry
) -> None:
    service.start()
    try:
        await server.start()
        telemetry.show(service.describe(), service.stats, service.measures)
        log.info("prefill server ready on %s:%d", config.host, server.port)
        await server.wait_until_stopped()
    finally:
        await service.close()
