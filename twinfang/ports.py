"""Free TCP ports for servers that are about to be started."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

from wire.errors import ConfigError

LOOPBACK = "127.0.0.1"
FIRST_PORT = 15_000
DEFAULT_EPHEMERAL_PORT = 32_768
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
MAX_TRIES = 1_000


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """``count`` ports on which nothing listens.

    They lie below the range from which the kernel takes ports for outgoing connections: otherwise, while a
    server restarts, somebody's connection could take its port.
    """
    candidates = range(FIRST_PORT, max(_first_ephemeral_port(), FIRST_PORT + MAX_TRIES))
    ports: list[int] = []
    with ExitStack() as held:
        for port in random.SystemRandom().sample(candidates, MAX_TRIES):
            if len(ports) == count:
                break
            probe = held.enter_context(socket.socket(_family(host)))
            try:
                probe.bind((host, port))
            except OSError:
                continue
            ports.append(port)
    if len(ports) < count:
        raise ConfigError(f"found {len(ports)} free ports on {host} where {count} are needed")
    return ports


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
