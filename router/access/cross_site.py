"""Refuses requests that address the router by a wrong host name, and requests from pages of other sites
(:mod:`wire.http.cross_site`)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial

from starlette.types import Scope

from router.http.openai_errors import shown
from wire.errors import HostNotAllowedError, InvalidRequestError, OriginNotAllowedError
from wire.http.cross_site import AllowedHosts, is_of_another_site

NAMES_KEPT = 256
"""Clients use few names of a router, so each name is checked once. A client that makes up names replaces some
of them, and waits for its own checks only."""


class HostCheck:
    """Knows by which host names requests may address the router. HTTP/1.0 requests may omit ``Host``."""

    def __init__(self, allowed: AllowedHosts | None) -> None:
        """``allowed``: None if every name is allowed."""
        self._takes = None if allowed is None else lru_cache(NAMES_KEPT)(allowed.takes)

    def refuse(self, scope: Scope) -> None:
        """Raise :class:`InvalidRequestError` if the request has another name than those allowed."""
        if self._takes is None:
            return
        given = [value for name, value in scope["headers"] if name == b"host"]
        if len(given) != 1:
            if not given and scope.get("http_version") == "1.0":
                return  # today's browsers don't use HTTP/1.0
            raise InvalidRequestError(f"a request needs exactly one Host header, this one has {len(given)}")
        host = given[0].decode("latin-1")
        if not self._takes(host):
            raise HostNotAllowedError(
                f"this router does not accept the host name {shown(host)}: use another name of it, or start "
                "it with --allowed-host and this name without its port"
            )


class OriginCheck:
    """Knows from pages of which sites requests may come."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(allowed)

    def refuse(self, scope: Scope) -> None:
        """Raise :class:`OriginNotAllowedError` if the request is from a page of another site."""
        header = partial(_header, scope)
        if not is_of_another_site(scope.get("method", ""), header, self._allowed):
            return
        origin = header("origin")
        whose = "another site" if origin is None else f"origin {shown(origin)}"
        raise OriginNotAllowedError(
            f"pages of {whose} may not send requests here: to allow them, start the router with "
            "--cors-origin and the page's origin, as in https://chat.example.com"
        )


def _header(scope: Scope, wanted: str) -> str | None:
    name = wanted.encode("latin-1")
    values = [value for other, value in scope["headers"] if other == name]
    return b", ".join(values).decode("latin-1") if values else None
