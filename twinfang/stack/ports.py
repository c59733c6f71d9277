"""Finds free TCP ports for servers that are about to start."""

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
"""Ports that this process has chosen. Perhaps nothing listens on them yet, but no port is chosen twice."""


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Returns ``count`` ports on which nothing listens.

    The ports lie below the range from which the system takes ports for outgoing connections. Otherwise an
    outgoing connection could take a server's port while the server restarts. Another process may choose the
    same ports until something listens on them, or :func:`ports_held` holds them.
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
    """Holds these ports inside the ``with`` statement, so that no process gets them from :func:`free_ports`
    before our servers listen on them or while a server restarts.

    A socket that is bound but does not listen blocks every process that does not set SO_REUSEADDR; our
    servers set this option. On systems other than Linux the socket would block servers too, so no port is
    held there. Raises :class:`ConfigError` if a port is taken.
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
    """Raises :class:`ConfigError` if it is impossible to listen on ``host:port`` now."""
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
