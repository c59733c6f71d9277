"""Hosts written together with ports, and the check for loopback addresses."""

from __future__ import annotations

import ipaddress


def host_port(host: str, port: int) -> str:
    """Returns ``host:port``, with brackets around an IPv6 address."""
    is_bare_ipv6 = ":" in host and not host.startswith("[")
    return f"[{host}]:{port}" if is_bare_ipv6 else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether ``host`` is an address that only this machine can reach, or the name of such an address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
