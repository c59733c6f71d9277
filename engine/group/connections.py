"""Connects the processes of a group: a process that connects proves with the group's secret that it belongs
to the group, and says which rank it is.

The terms of a rank are values that must be the same on all ranks. A message on the wire consists of its
length, in four bytes, and the encoded message.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import selectors
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from wire.codec import decode, encode
from wire.errors import ConfigError, DeadlineError, WireError
from wire.http.address import host_port
from wire.messages.group import Hello, Refusal

if TYPE_CHECKING:
    from wire.tls.identity import Identity

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
GREETING_TIMEOUT_S = 10.0
"""Time in which a caller has to say which rank it is."""
ONE_RELEASE = {"Twinfang's version": importlib.metadata.version("twinfang")}
"""A term of all groups. Ranks take the same decisions from the same calls, so they are of one release."""
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
    identity: Identity | None = None,
) -> dict[int, socket.socket]:
    """Connects to every other process: calls the processes of lower rank, and waits for calls from the
    processes of higher rank.

    ``addresses`` returns the address at which a rank listens, and may wait until the address is known.
    ``deadline_s`` is on the monotonic clock. ``identity`` is for mutual TLS. Raises :class:`ConfigError`,
    which names the term, if a term
    differs between two ranks, :class:`DeadlineError` if ranks have not called in time, and what :func:`call`
    raises.
    """
    connections = {other: call(addresses(other), hello, identity) for other in range(rank)}
    missing = dict(enumerate(names[rank + 1 :], rank + 1))
    if not missing:
        return connections
    with Reception(listening, hello, identity) as reception:
        while missing:
            caller, connection = reception.next(missing, deadline_s=deadline_s)
            connections[caller] = connection
            del missing[caller]
    return connections


def call(address: tuple[str, int], hello: Hello, identity: Identity | None = None) -> socket.socket:
    """Connects to the process that listens at ``address``.

    Raises :class:`OSError`, :class:`EOFError` or :class:`WireError` if no process of the group listens there,
    and :class:`ConfigError` if a term differs or the other process does not wait for this rank.
    """
    connection = socket.create_connection(address, CONNECT_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if identity is not None:
        from wire.tls.relay import called  # only with TLS, since its library takes a while to import

        connection = called(connection, identity)
        connection.settimeout(CONNECT_TIMEOUT_S)
    try:
        _send(connection, hello)
        reply = _reply(connection)
        if isinstance(reply, Refusal):
            raise ConfigError(reply.reason)
        _compare(hello, reply)
    except BaseException:
        connection.close()
        raise
    return connection


class Reception:
    """Answers calls: lets in each missing rank that knows the secret.

    It reads from all callers at the same time, so that a silent caller does not keep the others waiting.
    """

    def __init__(self, listening: socket.socket, hello: Hello, identity: Identity | None = None) -> None:
        """Starts to answer on ``listening``, which the caller closes later. ``identity``: for mutual TLS."""
        self._identity = identity
        self._listening = listening
        self._hello = hello
        self._callers: list[_Caller] = []
        self._selector = selectors.DefaultSelector()
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)

    def __enter__(self) -> Reception:
        return self

    def __exit__(self, *_: object) -> None:
        for caller in self._callers:
            caller.connection.close()
        self._selector.close()

    def next(self, missing: dict[int, str], *, deadline_s: float) -> tuple[int, socket.socket]:
        """Waits for a call from one of the ``missing`` ranks. Returns this rank and the connection to it.

        ``missing`` maps ranks to their names. ``deadline_s`` is on the monotonic clock. Raises
        :class:`DeadlineError` if no rank called by then, and :class:`ConfigError` if a rank's terms differ.
        """
        while (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in self._selector.select(min(left_s, 1.0)):
                if key.data is None:
                    self._pick_up()
                elif (theirs := self._greeting(key.data)) and self._admits(key.data, theirs, missing):
                    return theirs.rank, key.data.connection
            for caller in [one for one in self._callers if time.monotonic() > one.deadline_s]:
                self._dismiss(caller, f"did not say within {GREETING_TIMEOUT_S:g} s which rank it is")
        raise DeadlineError(f"{', '.join(missing.values())} did not come; start all ranks of a group")

    def _pick_up(self) -> None:
        with contextlib.suppress(OSError):  # the caller has hung up already
            connection, address = self._listening.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._identity is not None:
                from wire.tls.relay import answered

                connection = answered(connection, self._identity)
            connection.setblocking(False)
            caller = _Caller(connection, host_port(*address[:2]))
            self._callers.append(caller)
            self._selector.register(connection, selectors.EVENT_READ, caller)

    def _greeting(self, caller: _Caller) -> Hello | None:
        """Returns the greeting of a caller if it is complete and the caller knows the secret."""
        try:
            theirs = caller.listen()
        except (OSError, EOFError, WireError) as error:
            self._dismiss(caller, f"is not a rank: {error}")
            return None
        if theirs is not None and theirs.secret != self._hello.secret:
            self._dismiss(caller, "is not a rank of this group")
            return None
        return theirs

    def _admits(self, caller: _Caller, theirs: Hello, missing: Collection[int]) -> bool:
        caller.connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            if theirs.terms == self._hello.terms and theirs.rank not in missing:
                reason = (
                    f"{theirs.name} is not missing: it was started twice, or two were given the same number"
                )
                _send(caller.connection, Refusal(reason))
                self._dismiss(caller, f"is refused: {reason}")
                return False
            _send(caller.connection, self._hello)
        except OSError as error:
            self._dismiss(caller, f"is gone: {error}")
            return False
        _compare(self._hello, theirs)
        self._forget(caller)
        return True

    def _dismiss(self, caller: _Caller, why: str) -> None:
        log.warning("%s called and %s", caller.address, why)
        self._forget(caller)
        caller.connection.close()

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        self._callers.remove(caller)


class _Caller:
    """A caller that has not said yet which rank it is."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection = connection
        self.address = address
        self.deadline_s = time.monotonic() + GREETING_TIMEOUT_S
        self._buffer = b""

    def listen(self) -> Hello | None:
        """Reads the bytes that have arrived. Returns the greeting, or None if a part of it is still missing.

        Raises :class:`EOFError` if the connection was closed, and :class:`WireError` for an invalid message.
        """
        part = self.connection.recv(MAX_MESSAGE_BYTES)
        if not part:
            raise EOFError("the connection was closed")
        self._buffer += part
        if len(self._buffer) < LENGTH_BYTES:
            return None
        end = LENGTH_BYTES + length_of(self._buffer)
        return decode(self._buffer[LENGTH_BYTES:end], Hello) if len(self._buffer) >= end else None


def _compare(ours: Hello, theirs: Hello) -> None:
    for term in sorted(ours.terms | theirs.terms):
        here, there = ours.terms.get(term), theirs.terms.get(term)
        if here != there:
            raise ConfigError(
                f"{term} is {there} on {theirs.name} and {here} on {ours.name}: "
                "it must be the same on all ranks"
            )


def _send(connection: socket.socket, message: object) -> None:
    data = encode(message)
    connection.sendall(len(data).to_bytes(LENGTH_BYTES, "big") + data)


def _reply(connection: socket.socket) -> Hello | Refusal:
    length = length_of(_read_exactly(connection, LENGTH_BYTES))
    reply: Any = decode(_read_exactly(connection, length), Hello, Refusal)
    assert isinstance(reply, Hello | Refusal)
    return reply


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError("the connection was closed")
        data += part
    return data


def length_of(data: bytes | bytearray) -> int:
    """Returns the length of the message that begins with these bytes.

    Raises :class:`WireError` if it exceeds :data:`MAX_MESSAGE_BYTES`.
    """
    length = int.from_bytes(data[:LENGTH_BYTES], "big")
    if length > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {length} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    return length
