"""How hosts and ports are written together."""

from __future__ import annotations


def host_port(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    is_bare_ipv6 = ":" in host and not host.startswith("[")
    return f"[{host}]:{port}" if is_bare_ipv6 else f"{host}:{port}"
