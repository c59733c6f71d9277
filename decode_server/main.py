"""The decode server's process."""

from __future__ import annotations

import asyncio
import logging
import secrets

from decode_server.config import DecodeConfig
from decode_server.service import DecodeService
from wire.server import GrpcServer

log = logging.getLogger(__name__)


def run(config: DecodeConfig) -> None:
    """Serves until SIGTERM or SIGINT. Raises what made it unable to start or to go on."""
    asyncio.run(_serve(config))


async def _serve(config: DecodeConfig) -> None:
    server = GrpcServer(config.host, config.port)
    service = DecodeService(config, server, incarnation=secrets.token_hex(8))
    service.start()
    try:
        await server.start()
        log.info("%s server ready on %s:%d", config.engine.role, config.host, server.port)
        await server.wait_until_stopped(service.drain)
    finally:
        await service.close()
