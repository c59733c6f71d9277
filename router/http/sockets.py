"""The sockets that a router listens on."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from router.config import RouterConfig
from wire.errors import ConfigError
from wire.http.address import host_port

LOOPBACK = "127.0.0.1"


ANY_IPV6 = "::"


def shared_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address that other processes of the same user may share (SO_REUSEPORT).

    The operating system distributes connections among the listening processes. Raises :class:`ConfigError`.
    """
    return _bound(host, port, is_shared=True)


def kept_socket(port: int) -> socket.socket:
    """Return a socket that keeps a port of loopback for :func:`shared_socket` of this user's processes. It
    never listens.

    It does not set SO_REUSEADDR, with which every user's processes could have the port while none of ours
    listens. Raises :class:`ConfigError`.
    """
    return _bound(LOOPBACK, port, is_shared=True, is_reused=False)


def _bound(host: str, port: int, *, is_shared: bool, is_reused: bool = True) -> socket.socket:
    with ExitStack() as exits:
        bound = exits.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
        if is_reused:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if host == ANY_IPV6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            bound.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"can't listen on {host_port(host, port)}: {error.strerror}; choose another --port"
            ) from error
        exits.pop_all()
        return bound


def sockets_of(config: RouterConfig) -> list[socket.socket] | None:
    """Return the sockets of one of several processes: the port that all share, and the process's own port.
    None: this is the only process, so the HTTP server binds its port itself.

    The address ``::`` takes IPv4 clients as well, which asyncio's own sockets do not.
    """
    place = config.place
    if place is None:
        return [_bound(config.host, config.port, is_shared=False)] if config.host == ANY_IPV6 else None
    return [shared_socket(config.host, config.port), shared_socket(LOOPBACK, place.own_port)]
