"""Finds out which client a request is from. The router is fair between clients."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network, ip_address

from starlette.requests import HTTPConnection

from router.access.api_keys import NOBODY, ApiKey

IPV6_SITE_BITS = 64
"""The length of the network prefix that identifies an IPv6 client. Single addresses would not, because one
host gets a whole network and may use any number of its addresses (RFC 6177)."""


@dataclass(frozen=True)
class Client:
    """A client. When clients together ask for more than the servers can do, each client gets a part, which
    all its requests share."""

    name: str = ""
    """The client's unique name, which begins with ``key`` or ``address``; empty if its address is unknown, or
    if clients are not distinguished."""
    api_key: ApiKey = NOBODY


ANYBODY = Client()
"""The client of all requests where clients are not distinguished."""


def client_of(request: HTTPConnection) -> Client:
    """Return a request's client: by API key or, if the router has no keys, by network address."""
    api_key = getattr(request.state, "api_key", NOBODY)
    assert isinstance(api_key, ApiKey)
    if api_key is not NOBODY:
        return Client(f"key {api_key.name}", api_key)
    return Client(f"address {site_of(request.client.host)}" if request.client else "", api_key)


def client_name(request: HTTPConnection) -> str:
    return client_of(request).name


def site_of(host: str) -> str:
    """Return an IPv4 address as it is, or the network of an IPv6 address. All requests for which a proxy
    gives no address count as one client."""
    try:
        address = ip_address(host)
    except ValueError:
        return "unknown"
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Network((int(address), IPV6_SITE_BITS), strict=False))
