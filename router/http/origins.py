"""Requests that a page of another site has its reader's browser send.

A browser asks (CORS preflight) before most of them, and gets no leave from a router unless ``--cors-origin``
names the page's origin. It does not ask before a POST without a Content-Type, an image or a script.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from router.http.authority import Authority
from router.openai_errors import error_response, shown
from wire.errors import OriginNotAllowedError

ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<authority>.+)", re.IGNORECASE)
DEFAULT_PORTS = {"http": 80, "https": 443}
OWN_SITES = ("same-origin", "none")
"""``none``: somebody typed the address, or chose a bookmark."""


class OriginsMiddleware:
    """Pure ASGI: refuses them, whatever they are for. What says nothing of a site is no browser's."""

    def __init__(self, app: ASGIApp, *, allowed: Iterable[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not self._allows(scope):
            await error_response(self._error(scope))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        origin, site = _header(scope, b"origin"), _header(scope, b"sec-fetch-site")
        if (origin is None and site is None) or "*" in self._allowed or origin in self._allowed:
            return True
        if site is not None:  # the browser's own word, which no page can choose
            return site in OWN_SITES or (origin is None and _is_link(scope))
        return origin is not None and _is_own(origin, _header(scope, b"host"))

    def _error(self, scope: Scope) -> OriginNotAllowedError:
        origin = _header(scope, b"origin")
        whose = "another site" if origin is None else f"origin {shown(origin)}"
        return OriginNotAllowedError(
            f"pages of {whose} may not send requests here: if they should, start the router with "
            "--cors-origin and the page's origin, as in https://chat.example.com"
        )


def _header(scope: Scope, wanted: bytes) -> str | None:
    """Of several equal headers none counts for much: they become one that is no origin and no site."""
    values = [value for name, value in scope["headers"] if name == wanted]
    return b", ".join(values).decode("latin-1") if values else None


def _is_link(scope: Scope) -> bool:
    """Somebody followed a link to here: the page that it was on gets to see nothing."""
    return (
        scope.get("method") in ("GET", "HEAD")
        and _header(scope, b"sec-fetch-mode") == "navigate"
        and _header(scope, b"sec-fetch-dest") == "document"
    )


def _is_own(origin: str, host: str | None) -> bool:
    """Whether a page of ``origin`` came from the host that it asks now.

    Who ends TLS in front of the router is not known: a port that is not said is the one usual for the
    origin's scheme.
    """
    found = ORIGIN.fullmatch(origin)
    page = None if found is None else Authority.parse(found["authority"])
    asked = None if host is None else Authority.parse(host)
    if found is None or page is None or asked is None:
        return False
    usual = DEFAULT_PORTS.get(found["scheme"].lower())
    return page.host == asked.host and (page.port or usual) == (asked.port or usual)
