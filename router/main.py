"""The router's process."""

from __future__ import annotations

import gc
import logging
import math

import uvicorn

from router.app import create_app
from router.config import RouterConfig
from router.listening import sockets_of

log = logging.getLogger(__name__)

NEW_OBJECTS_PER_COLLECTION = 50_000
"""Python's own 700 would have every step message of some hundred requests start a collection."""
KEEP_ALIVE_S = 75
"""Longer than the pools of common clients keep an idle connection, so that the client closes it first."""


def run(config: RouterConfig) -> None:
    """Serves until SIGTERM or SIGINT; answers under way get ``shutdown_grace_s`` to end.

    Raises :class:`SystemExit` with a code other than 0 if the router could not start or a part of it died.
    """
    fatal: list[BaseException] = []

    def on_fatal(error: BaseException) -> None:
        fatal.append(error)
        server.should_exit = True

    server = uvicorn.Server(
        uvicorn.Config(
            create_app(config, on_fatal=on_fatal),
            host=config.host,
            port=config.port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(config.shutdown_grace_s),
        )
    )
    _calm_the_collector()
    server.run(sockets_of(config))
    if fatal or not server.started:
        raise SystemExit(1)


def _calm_the_collector() -> None:
    """What is there at the start stays, so collections need not look at it each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS_PER_COLLECTION, 20, 20)
