"""Refuses requests by names that are not the router's (:mod:`wire.cross_site`)."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from router.openai_errors import error_response, shown
from wire.cross_site import AllowedHosts
from wire.errors import HostNotAllowedError, InvalidRequestError


class AllowedHostsMiddleware:
    """Pure ASGI: refuses requests by another name, whatever they are for. HTTP/1.0 may name none."""

    def __init__(self, app: ASGIApp, *, allowed: AllowedHosts) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope) if scope["type"] in ("http", "websocket") else None
        await (self._app if error is None else error_response(error))(scope, receive, send)

    def _error(self, scope: Scope) -> InvalidRequestError | None:
        given = [value for name, value in scope["headers"] if name == b"host"]
        if len(given) != 1:
            if not given and scope.get("http_version") == "1.0":
                return None  # no browser of today
            return InvalidRequestError(f"a request needs one Host header, this one has {len(given)}")
        host = given[0].decode("latin-1")
        if self._allowed.takes(host):
            return None
        return HostNotAllowedError(
            f"this router does not go by the name {shown(host)}: if it should, start it with --allowed-host "
            "and that name without its port"
        )
