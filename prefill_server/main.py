"""The prefill server's process."""

from __future__ import annotations

from functools import partial

from prefill_server.config import PrefillConfig
from prefill_server.service import PrefillService
from telemetry.server_process import run_server


def run(config: PrefillConfig) -> None:
    """Serves until SIGTERM or SIGINT. Raises what made it unable to start or to go on."""
    run_server(config, config.engine.role, partial(PrefillService, config))
