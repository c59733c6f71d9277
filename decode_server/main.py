"""The decode server's process."""

from __future__ import annotations

from functools import partial

from decode_server.config import DecodeConfig
from decode_server.service import DecodeService
from telemetry.server_process import run_server


def run(config: DecodeConfig) -> None:
    """Serves until SIGTERM or SIGINT. Raises what made it unable to start or to go on."""
    run_server(config, config.engine.role, partial(DecodeService, config))
