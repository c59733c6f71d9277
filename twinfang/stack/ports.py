"""Free TCP ports for servers that are about to be started."""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from wire.errors import ConfigError

LOOPBACK = "127.0.0.1"
FIRST_PORT = 15_000
DEFAULT_EPHEMERAL_PORT = 32_768
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
MAX_TRIES = 1_000

_given: set[int] = set()
"""Ports that this process was given and that nothing may listen on yet: no two calls give the same one."""


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """``count`` ports on which nothing listens.

    They lie below the range from which the kernel takes ports for outgoing connections: otherwise, while a
    server restarts, somebody's connection could take its port. Other processes may be given them as well
    until something listens there, or they are :func:`ports_held`.
    """
    candidates = range(FIRST_PORT, max(_first_ephemeral_port(), FIRST_PORT + MAX_TRIES))
    ports: list[int] = []
    with ExitStack() as held:
        for port in random.SystemRandom().sample(candidates, MAX_TRIES):
            if len(ports) == count:
                break
            if port in _given:
                continue
            probe = held.enter_context(socket.socket(_family(host)))
            try:
                probe.bind((host, port))
            except OSError:
                continue
            ports.append(port)
    if len(ports) < count:
        raise ConfigError(f"found {len(ports)} free ports on {host} where {count} are needed")
    _given.update(ports)
    return ports


@contextmanager
def ports_held(addresses: Iterable[str]) -> Iterator[None]:
    """Nobody is given these ports by :func:`free_ports` inside the block, also before a server of ours
    listens there and while it restarts.

    A socket that is bound and does not listen is in the way of all but those who set SO_REUSEADDR, as servers
    do. Elsewhere than on Linux it would be in their way, too: there nothing is held. Raises
    :class:`ConfigError` for a port that somebody has taken.
    """
    with ExitStack() as exits:
        for address in addresses if sys.platform == "linux" else ():
            host, _, port = address.rpartition(":")
            host = host.strip("[]")
            holder = exits.enter_context(socket.socket(_family(host)))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind((host, int(port)))
            except OSError as error:
                raise ConfigError(f"can't have {address}: {error.strerror}; start again") from error
        yield


def require_free(host: str, port: int, *, flag: str = "--port") -> None:
    """Raises :class:`ConfigError` if nobody could listen on ``host:port`` now."""
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{flag} {port}: can't listen on {host}:{port}: {error.strerror}; choose another {flag}"
                f"{', or 0 for any free one' if flag == '--port' else ', or 0 for none'}"
            ) from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _first_ephemeral_port() -> int:
    try:
        return int(EPHEMERAL_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return DEFAULT_EPHEMERAL_PORT
