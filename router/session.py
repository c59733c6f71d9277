"""Which session an HTTP request belongs to."""

from __future__ import annotations

from fastapi import Request

from router.config import RouterConfig


def session_of(request: Request, config: RouterConfig) -> str | None:
    """The value of the configured header; None without such a header, or if it is empty."""
    return request.headers.get(config.session_header) or None if config.session_header else None
