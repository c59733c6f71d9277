"""The router's process."""

from __future__ import annotations

import gc
import logging

from router.app import create_app
from router.config import RouterConfig
from router.heap import keep_small
from router.http.server import HttpServer
from router.http.sockets import sockets_of
from wire.open_files import raise_open_file_limit

log = logging.getLogger(__name__)

NEW_OBJECTS_PER_COLLECTION = 10_000
"""With Python's default of 700, every step message with some hundred requests would start a collection.
Requests that end are freed without a collection; only a few requests that fail are freed by the next
collection."""


def run(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT. Answers in progress then get ``shutdown_grace_s`` to end.

    Raises :class:`SystemExit` with a code other than 0 if the router could not start or a part of it died.
    """
    fatal: list[BaseException] = []

    def on_fatal(error: BaseException) -> None:
        fatal.append(error)
        server.should_exit = True

    keep_small()
    raise_open_file_limit()
    app = create_app(config, on_fatal=on_fatal)
    server = HttpServer(app, config, app.state.drain)
    _calm_the_collector()
    server.run(sockets_of(config))
    if fatal or not server.started:
        raise SystemExit(1)


def _calm_the_collector() -> None:
    """Make garbage collections rarer and cheaper. Collections need not look at objects that exist at the
    start, because these live as long as the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS_PER_COLLECTION, 5, 5)
