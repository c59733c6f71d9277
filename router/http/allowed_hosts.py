"""The names that requests may have for a router.

A page on any site can have its own name resolved to 127.0.0.1 once a browser has loaded it (DNS rebinding):
to the browser, the router is of the page's origin then. What gives it away is the name in ``Host``. An
address can't be rebound.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from router.config import RouterConfig
from router.http.authority import Authority
from router.openai_errors import error_response, shown
from wire.address import is_loopback
from wire.errors import HostNotAllowedError, InvalidRequestError


class AllowedHosts:
    """Loopback names, and those that were given: a name, or ``*.example.com`` for all below it."""

    def __init__(self, names: Iterable[str], *, takes_addresses: bool) -> None:
        self._names = {name.strip("[]").lower() for name in names if not name.startswith("*")}
        self._suffixes = tuple(name[1:].lower() for name in names if name.startswith("*."))
        self._takes_addresses = takes_addresses

    @classmethod
    def of(cls, config: RouterConfig) -> AllowedHosts | None:
        """None: any name will do. Where others reach the router, any address is taken too: probes use it."""
        on_loopback = is_loopback(config.host)
        if "*" in config.allowed_hosts or not (on_loopback or config.allowed_hosts):
            return None
        return cls(config.allowed_hosts, takes_addresses=not on_loopback)

    def takes(self, authority: Authority) -> bool:
        host = authority.host
        if is_loopback(host) or host in self._names or host.endswith((".localhost", *self._suffixes)):
            return True
        return self._takes_addresses and _is_address(host)


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
        authority = Authority.parse(host)
        if authority is not None and self._allowed.takes(authority):
            return None
        return HostNotAllowedError(
            f"this router does not go by the name {shown(host)}: if it should, start it with --allowed-host "
            "and that name without its port"
        )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
