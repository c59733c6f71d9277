"""Which client a request is from: what it is fair to."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network, ip_address

from starlette.requests import HTTPConnection

from router.access.api_keys import NOBODY, ApiKey

IPV6_SITE_BITS = 64
"""A host of IPv6 has a network of its own and as many addresses as it likes (RFC 6177)."""


@dataclass(frozen=True)
class Client:
    """Requests of one client share what it gets when many want more than there is."""

    name: str = ""
    """Unlike that of any other client. Begins with ``key`` or ``address``."""
    api_key: ApiKey = NOBODY


ANYBODY = Client()
"""Where nobody is told apart."""


def client_of(request: HTTPConnection) -> Client:
    """By API key; where there are no keys, by network address."""
    api_key = getattr(request.state, "api_key", NOBODY)
    assert isinstance(api_key, ApiKey)
    if api_key is not NOBODY:
        return Client(f"key {api_key.name}", api_key)
    return Client(f"address {site_of(request.client.host)}" if request.client else "", api_key)


def client_name(request: HTTPConnection) -> str:
    return client_of(request).name


def site_of(host: str) -> str:
    """The address of IPv4, the network of IPv6; all that a proxy gives no address for are one client."""
    try:
        address = ip_address(host)
    except ValueError:
        return "unknown"
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Network((int(address), IPV6_SITE_BITS), strict=False))
