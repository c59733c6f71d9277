"""Headers that say how long a request may take and which session it belongs to."""

from __future__ import annotations

import asyncio
import math

from fastapi import Request

from router.config import RouterConfig
from router.http.bodies.bounds import SESSION
from router.http.openai_errors import shown
from router.http.request_head import header_of
from wire.errors import InvalidRequestError


def session_of(request: Request, config: RouterConfig) -> str | None:
    """Return the value of the configured session header; None if it is missing or empty, or if none is
    configured.

    Raises :class:`InvalidRequestError` if the value is too long.
    """
    if not config.session_header:
        return None
    session = request.headers.get(config.session_header) or None
    SESSION.check(session, config.session_header)
    return session


HEADER = "X-Request-Timeout"
"""The header that limits a request's time from its arrival to its last token, in seconds."""


def deadline_of(request: Request, config: RouterConfig) -> float:
    """Return the request's deadline on the event loop's clock. Raises :class:`InvalidRequestError` if the
    header is not a time."""
    given = header_of(request.scope, b"x-request-timeout")
    timeout_s = config.request_timeout_s
    if given is not None:
        seconds = _seconds(given)
        request.state.chose_deadline = seconds < timeout_s
        timeout_s = min(timeout_s, seconds)
    return asyncio.get_running_loop().time() + timeout_s


def _seconds(text: str) -> float:
    try:
        value = float(text) if text.isascii() else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise InvalidRequestError(
            f"{HEADER} must be a number of seconds above 0, got {shown(text)}", param=HEADER
        )
    return value
