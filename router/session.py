"""Which session an HTTP request belongs to."""

from __future__ import annotations

from fastapi import Request

from router.config import RouterConfig
from router.http.bounds import SESSION


def session_of(request: Request, config: RouterConfig) -> str | None:
    """The value of the configured header; None without such a header, or if it is empty.

    Raises :class:`InvalidRequestError` for one that is too long.
    """
    session = request.headers.get(config.session_header) or None if config.session_header else None
    SESSION.check(session, config.session_header)
    return session
