"""How the processes of a group connect: whoever knows the group's secret says which rank it is.

A message is four bytes of length and the encoded message.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence

from wire.address import host_port
from wire.codec import decode, encode
from wire.errors import ConfigError, DeadlineError, WireError
from wire.lockstep import Hello

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
MAX_MESSAGE_BYTES = 1 << 16
LENGTH_BYTES = 4


def connect_all(
    rank: int,
    listening: socket.socket,
    addresses: Callable[[int], tuple[str, int]],
    hello: Hello,
    *,
    names: Sequence[str],
    deadline_s: float,
) -> dict[int, socket.socket]:
    """A connection to each other process: those of lower rank are called, those of higher rank call.

    ``addresses`` says where a rank listens and may wait for that. ``deadline_s`` is on the monotonic clock.
    Raises :class:`ConfigError` that names what differs between two ranks, :class:`DeadlineError` for ranks
    that did not come.
    """
    connections: dict[int, socket.socket] = {}
    for other in range(rank):
        connection, theirs = call(addresses(other), hello)
        _compare(hello, theirs, names)
        connections[other] = connection
    while len(connections) < len(names) - 1:
        missing = [other for other in range(rank + 1, len(names)) if other not in connections]
        connection, theirs = answer(listening, hello, missing, names=names, deadline_s=deadline_s)
        _compare(hello, theirs, names)
        connections[theirs.rank] = connection
    return connections


def call(address: tuple[str, int], hello: Hello) -> tuple[socket.socket, Hello]:
    """A connection to who listens at ``address``, and how he has greeted.

    Raises :class:`OSError`, :class:`EOFError` or :class:`WireError` where nobody does.
    """
    connection = socket.create_connection(address, CONNECT_TIMEOUT_S)
    _send(connection, hello)
    theirs = _receive(connection, Hello)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection, theirs


def answer(
    listening: socket.socket,
    hello: Hello,
    expected: Sequence[int],
    *,
    names: Sequence[str],
    deadline_s: float,
) -> tuple[socket.socket, Hello]:
    """The next connection of one of the ranks that are ``expected`` and knows the secret; others are refused.

    ``deadline_s`` is on the monotonic clock. Raises :class:`DeadlineError`.
    """
    while True:
        listening.settimeout(max(0.1, deadline_s - time.monotonic()))
        try:
            connection, peer_address = listening.accept()
        except TimeoutError:
            missing = ", ".join(names[other] for other in expected)
            raise DeadlineError(f"{missing} did not come; start all ranks of a group") from None
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            theirs = _receive(connection, Hello)
        except (OSError, EOFError, WireError) as error:
            log.warning("%s called and is no rank: %s", host_port(*peer_address[:2]), error)
            connection.close()
            continue
        if theirs.secret != hello.secret or theirs.rank not in expected:
            log.warning("%s called and is no rank of this group", host_port(*peer_address[:2]))
            connection.close()
            continue
        _send(connection, hello)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection, theirs


def _compare(ours: Hello, theirs: Hello, names: Sequence[str]) -> None:
    for term in sorted(ours.terms | theirs.terms):
        here, there = ours.terms.get(term), theirs.terms.get(term)
        if here != there:
            raise ConfigError(
                f"{term} is {there} on {names[theirs.rank]} and {here} on {names[ours.rank]}: "
                "it must be the same on all ranks"
            )


def _send(connection: socket.socket, message: object) -> None:
    data = encode(message)
    connection.sendall(len(data).to_bytes(LENGTH_BYTES, "big") + data)


def _receive(connection: socket.socket, expected: type[Hello]) -> Hello:
    length = length_of(_read_exactly(connection, LENGTH_BYTES))
    return decode(_read_exactly(connection, length), expected)


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError("the connection was closed")
        data += part
    return data


def length_of(data: bytes | bytearray) -> int:
    """Of the message that these bytes begin. Raises :class:`WireError` for more than may be sent."""
    length = int.from_bytes(data[:LENGTH_BYTES], "big")
    if length > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {length} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    return length
