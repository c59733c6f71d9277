"""Checks for addresses that lead to a machine's own surroundings: link-local addresses, and metadata
addresses, where clouds give a machine its credentials.

Someone who may add workers should not reach these addresses through the router. Addresses from flags and from
discovery are chosen by the operator and not checked.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterator

from wire.errors import ConfigError

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

RESOLVE_TIMEOUT_S = 2.0
IPV4_LAST = tuple(
    map(
        ipaddress.IPv6Network,
        ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48"),
    )
)
"""IPv6 networks whose addresses end in an IPv4 address: compatible and mapped (RFC 4291, section 2.5.5),
translated (RFC 2765, section 2.1), NAT64 (RFC 6052, section 2.1), and NAT64 with local prefixes (RFC
8215)."""
METADATA = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200")))
"""Metadata addresses of Amazon and Google over IPv6, and of Alibaba. The metadata addresses of other clouds
are link-local."""


async def require_reachable(address: str) -> None:
    """Raises :class:`ConfigError` if the host in ``host:port`` stands for a link-local or a metadata address.

    A name that can't be resolved yet is allowed, so the check is repeated before each connection.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            found = await resolved(host)
    except (OSError, TimeoutError, UnicodeError):
        return
    for text in filter(_is_link_local, found):
        raise ConfigError(
            f"{host} stands for {text}, a link-local address or one where clouds keep a machine's "
            "credentials: if a server is there, start the router with --allow-link-local-workers"
        )


async def resolved(host: str) -> list[str]:
    """Resolve a host as a connection would. Unusual ways to write an IPv4 address are resolved, too."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(info[4][0]) for info in infos]


def _is_link_local(text: str) -> bool:
    return any(ip.is_link_local or ip in METADATA for ip in _meant(ipaddress.ip_address(text)))


def _meant(ip: IPAddress) -> Iterator[IPAddress]:
    """Yield the address itself, and the IPv4 addresses into which a gateway may translate it."""
    yield ip
    if isinstance(ip, ipaddress.IPv4Address):
        return
    if any(ip in network for network in IPV4_LAST):
        yield ipaddress.IPv4Address(ip.packed[-4:])
    if ip.sixtofour is not None:
        yield ip.sixtofour
    if ip.teredo is not None:
        yield from ip.teredo
