"""Addresses that lead to a machine's own surroundings: link-local ones, and those where clouds tell a machine
its credentials.

Whoever may add workers should not reach those through the router. The flags' and discovery's addresses are
their operator's, and are not looked at.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket

from wire.errors import ConfigError

RESOLVE_TIMEOUT_S = 2.0
NAT64 = ipaddress.ip_network("64:ff9b::/96")
METADATA = frozenset(map(ipaddress.ip_address, ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200")))
"""Of Amazon and of Google over IPv6, of Alibaba; the others' are link-local."""


async def require_reachable(address: str) -> None:
    """Raises :class:`ConfigError` if the host in ``host:port`` stands for such an address. A name that nobody
    knows yet will do, so this is asked again before each connection.
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
    """As a connection would resolve it, odd ways to write an IPv4 address included."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(info[4][0]) for info in infos]


def _is_link_local(text: str) -> bool:
    ip = ipaddress.ip_address(text)
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or (ipaddress.IPv4Address(ip.packed[-4:]) if ip in NAT64 else ip)
    return ip.is_link_local or ip in METADATA
