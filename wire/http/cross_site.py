"""What gives away a request that a page of another site has its reader's browser send.

A page on any site can have its own name resolved to 127.0.0.1 once a browser has loaded it (DNS rebinding):
to the browser, our port is of the page's origin then. What gives it away is the name in ``Host``. An address
can't be rebound.

Of a page under its own name, a browser asks (CORS preflight) before most requests, but not before a POST
without a Content-Type, an image or a script. What gives those away is ``Origin`` and ``Sec-Fetch-Site``.
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
"""``none``: somebody typed the address, or chose a bookmark."""

Header = Callable[[str], str | None]
"""The value of a header by its name in lower case. Several equal headers become one value with commas, which
is no host, no origin and no site."""


class AllowedHosts:
    """Loopback names, and those that were given: a name, or ``*.example.com`` for all below it."""

    def __init__(self, names: Iterable[str], *, takes_addresses: bool) -> None:
        self._names = {name.strip("[]").lower() for name in names if not name.startswith("*")}
        self._suffixes = tuple(name[1:].lower() for name in names if name.startswith("*."))
        self._takes_addresses = takes_addresses

    @classmethod
    def of(cls, listens_on: str, names: tuple[str, ...] = ()) -> AllowedHosts | None:
        """None: any name will do. Where others reach the port, any address is taken too: probes use it."""
        on_loopback = is_loopback(listens_on)
        if "*" in names or not (on_loopback or names):
            return None
        return cls(names, takes_addresses=not on_loopback)

    def takes(self, host: str) -> bool:
        """``host`` is what stands in the header: a name or an address, maybe with a port."""
        authority = Authority.parse(host)
        if authority is None:
            return False
        name = authority.host
        if is_loopback(name) or name in self._names or name.endswith((".localhost", *self._suffixes)):
            return True
        return self._takes_addresses and _is_address(name)


def is_of_another_site(method: str, header: Header, allowed: Container[str] = ()) -> bool:
    """Whether a page sent it whose origin is neither the port's own nor in ``allowed``, ``*`` for all. What
    says nothing of a site is no browser's."""
    origin, site = header("origin"), header("sec-fetch-site")
    if (origin is None and site is None) or "*" in allowed or (origin is not None and origin in allowed):
        return False
    if site is not None:  # the browser's own word, which no page can choose
        return site not in OWN_SITES and not (origin is None and _is_link(method, header))
    return origin is None or not _is_own(origin, header("host"))


def _is_link(method: str, header: Header) -> bool:
    """Somebody followed a link to here: the page that it was on gets to see nothing."""
    return (
        method in ("GET", "HEAD")
        and header("sec-fetch-mode") == "navigate"
        and header("sec-fetch-dest") == "document"
    )


def _is_own(origin: str, host: str | None) -> bool:
    """Whether a page of ``origin`` came from the host that it asks now.

    Who ends TLS in front of the port is not known: a port that is not said is the one usual for the origin's
    scheme.
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
