"""Finds out which client a request is from. The router is fair between clients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, IPv6Network, ip_address

from starlette.requests import HTTPConnection
from starlette.types import Scope

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


_IN_STATE = "client"


def note_client(scope: Scope, api_key: ApiKey) -> Client:
    """Return the client of a request with ``api_key``: by the key or, if the router has no keys, by network
    address. The request's later parts get it from :func:`client_of`."""
    if api_key is not NOBODY:
        client = Client(f"key {api_key.name}", api_key)
    else:
        peer = scope["client"]
        client = Client(f"address {site_of(peer[0])}" if peer else "", api_key)
    scope["state"][_IN_STATE] = client
    return client


def client_of(request: HTTPConnection) -> Client:
    """Return a request's client."""
    client: Client = request.scope["state"][_IN_STATE]
    return client


@lru_cache(1024)
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
