"""Detects a request that a page of another site made its visitor's browser send.

Once a browser has loaded a page, the page's site can resolve its own name to 127.0.0.1 (DNS rebinding). To
the browser, our port then belongs to the page's own site. The name in ``Host`` shows this attack. A ``Host``
that is an address is safe, since an address can't be rebound.

Without DNS rebinding, our port is another site to the page. Before most requests, the browser then asks us
whether they are allowed (CORS preflight). It does not ask before it sends a POST without a Content-Type or
loads an image or a script. ``Origin`` and ``Sec-Fetch-Site`` show these requests.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Container, Iterable

from wire.http.address import is_loopback
from wire.http.authority import Authority

ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<authority>.+)", re.IGNORECASE)
DEFAULT_PORTS = {"http": 80, "https": 443}
OWN_SITES = ("same-origin", "none")
"""Values of ``Sec-Fetch-Site`` that no page of another site causes. ``none``: the user typed the address or
chose a bookmark."""

Header = Callable[[str], str | None]
"""Returns the value of a header, given its name in lower case. Several headers of that name become one value
with commas, which is not a valid host, origin or site."""


class AllowedHosts:
    """Loopback names and the given names; ``*.example.com`` stands for all names that end in .example.com."""

    def __init__(self, names: Iterable[str], *, takes_addresses: bool) -> None:
        self._names = {name.strip("[]").lower() for name in names if not name.startswith("*")}
        self._suffixes = tuple(name[1:].lower() for name in names if name.startswith("*."))
        self._takes_addresses = takes_addresses

    @classmethod
    def of(cls, listens_on: str, names: tuple[str, ...] = ()) -> AllowedHosts | None:
        """Returns the allowed hosts of a port, None if every name is allowed.

        If other machines can reach the port, any address is allowed as well: probes use addresses.
        """
        on_loopback = is_loopback(listens_on)
        if "*" in names or not (on_loopback or names):
            return None
        return cls(names, takes_addresses=not on_loopback)

    def takes(self, host: str) -> bool:
        """Whether ``host``, the header's value, is allowed: a name or an address, maybe with a port."""
        authority = Authority.parse(host)
        if authority is None:
            return False
        name = authority.host
        if is_loopback(name) or name in self._names or name.endswith((".localhost", *self._suffixes)):
            return True
        return self._takes_addresses and _is_address(name)


def is_of_another_site(method: str, header: Header, allowed: Container[str] = ()) -> bool:
    """Whether the request comes from a page whose origin is neither the port's own nor in ``allowed``.

    ``*`` in ``allowed`` means all origins. A request with neither ``Origin`` nor ``Sec-Fetch-Site`` counts as
    sent without a browser.
    """
    origin, site = header("origin"), header("sec-fetch-site")
    if (origin is None and site is None) or "*" in allowed or (origin is not None and origin in allowed):
        return False
    if site is not None:  # the browser sets this header; no page can
        return site not in OWN_SITES and not (origin is None and _is_link(method, header))
    return origin is None or not _is_own(origin, header("host"))


def _is_link(method: str, header: Header) -> bool:
    """Whether a user followed a link to this port. The page with the link does not see the answer."""
    return (
        method in ("GET", "HEAD")
        and header("sec-fetch-mode") == "navigate"
        and header("sec-fetch-dest") == "document"
    )


def _is_own(origin: str, host: str | None) -> bool:
    """Whether a page of ``origin`` came from ``host``, to which its request was sent.

    A proxy that ends TLS in front of this port is unknown here, so a missing port means the default port of
    the origin's scheme.
    """
    found = ORIGIN.fullmatch(origin)
    page = None if found is None else Authority.parse(found["authority"])
    asked = None if host is None else Authority.parse(host)
    if found is None or page is None or asked is None:
        return False
    usual = DEFAULT_PORTS.get(found["scheme"].lower())
    return page.host == asked.host and (page.port or usual) == (asked.port or usual)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
