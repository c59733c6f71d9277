"""Refuses requests that address the router by a wrong host name, and requests from pages of other sites
(:mod:`wire.http.cross_site`)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from router.http.openai_errors import error_response, shown
from wire.errors import HostNotAllowedError, InvalidRequestError, OriginNotAllowedError
from wire.http.cross_site import AllowedHosts, is_of_another_site


class AllowedHostsMiddleware:
    """Pure ASGI: refuses requests on all paths if their ``Host`` header is not an allowed name. HTTP/1.0
    requests may omit this header."""

    def __init__(self, app: ASGIApp, *, allowed: AllowedHosts) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope) if scope["type"] in ("http", "websocket") else None
        await (self._app if error is None else error_response(error, scope))(scope, receive, send)

    def _error(self, scope: Scope) -> InvalidRequestError | None:
        given = [value for name, value in scope["headers"] if name == b"host"]
        if len(given) != 1:
            if not given and scope.get("http_version") == "1.0":
                return None  # today's browsers don't use HTTP/1.0
            return InvalidRequestError(f"a request needs exactly one Host header, this one has {len(given)}")
        host = given[0].decode("latin-1")
        if self._allowed.takes(host):
            return None
        return HostNotAllowedError(
            f"this router does not accept the host name {shown(host)}: use another name of it, or start it "
            "with --allowed-host and this name without its port"
        )


class OriginsMiddleware:
    """Pure ASGI: refuses requests from pages of other sites, on all paths."""

    def __init__(self, app: ASGIApp, *, allowed: Iterable[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            header = partial(_header, scope)
            if is_of_another_site(scope.get("method", ""), header, self._allowed):
                await error_response(_error(header("origin")), scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _error(origin: str | None) -> OriginNotAllowedError:
    whose = "another site" if origin is None else f"origin {shown(origin)}"
    return OriginNotAllowedError(
        f"pages of {whose} may not send requests here: to allow them, start the router with --cors-origin "
        "and the page's origin, as in https://chat.example.com"
    )


def _header(scope: Scope, wanted: str) -> str | None:
    name = wanted.encode("latin-1")
    values = [value for other, value in scope["headers"] if other == name]
    return b", ".join(values).decode("latin-1") if values else None
