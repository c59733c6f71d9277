"""Connections among the processes of a lockstep group, and what becomes of the group when one breaks.

Every process has one TCP connection to every other. They carry a few bytes a step (:mod:`engine.lockstep`)
and, once a second, that the sender is alive. A process that is gone closes its connections, one that is
frozen falls silent; either way the others can't go on without it: its experts are missing. Each of them says
so in one line, stops, and is ended if it can't stop, which a thread inside a collective can't.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from wire.address import host_port
from wire.codec import decode, encode
from wire.errors import ConfigError, DeadlineError, GroupLostError, WireError
from wire.lockstep import Alive, Hello, Leaving, Wish

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SILENCE_S = 8.0
"""After this long without a word a process counts as frozen."""
START_SILENCE_S = 120.0
"""The same while models are loaded and kernels compiled, some of which keeps the interpreter to itself."""
STOP_GRACE_S = 3.0
"""What a clean stop may take once the group is lost."""
CONNECT_TIMEOUT_S = 10.0
MAX_MESSAGE_BYTES = 1 << 16
_LENGTH_BYTES = 4


class Listener:
    """Who is told what comes over a mesh; this one takes note of nothing."""

    def heard(self, rank: int, wish: Wish) -> None:
        """Another rank's wish. Raises :class:`WireError` for one that can't be."""

    def leaving(self, rank: int) -> None:
        """Another server has nothing left to compute."""

    def lost(self, error: GroupLostError) -> None:
        """Somebody is gone, and with him the group; told once."""


class GroupMesh:
    """One process' connections. Its own thread reads; sending is for any thread, and never waits."""

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        *,
        names: Sequence[str],
        each: int,
    ) -> None:
        """``each``: processes of one server, the first of which speaks for it."""
        self.rank = rank
        self.size = len(connections) + 1
        self.lost: GroupLostError | None = None
        self._names = names
        self._each = each
        self._listener: Listener = Listener()
        self._left: set[int] = set()
        self._all_left = threading.Event()
        self._silence_s = START_SILENCE_S
        self._peers = {other: _Peer(other, connection) for other, connection in connections.items()}
        self._selector = selectors.DefaultSelector()
        for peer in self._peers.values():
            peer.connection.setblocking(False)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._is_closed = threading.Event()
        self._ends_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="group", daemon=True)

    def start(self, listener: Listener) -> None:
        """Reads from now on; ``listener`` is told on the mesh's thread."""
        self._listener = listener
        self._thread.start()

    def watch_closely(self) -> None:
        """All are ready to serve: from now on silence is short."""
        self._silence_s = SILENCE_S

    def tell(self, message: object, ranks: Iterable[int] | None = None) -> None:
        """Sends to some ranks, or to all others. What can't be sent is noticed by the thread that reads."""
        data = encode(message)
        frame = len(data).to_bytes(_LENGTH_BYTES, "big") + data
        for rank in self._peers if ranks is None else ranks:
            self._peers[rank].send(frame)

    def leave(self) -> None:
        """Tells the others that this server has nothing left to compute; connections may close afterwards."""
        self._note_left(self.rank)
        self.tell(Leaving())

    def wait_until_all_left(self, timeout_s: float) -> bool:
        """Whether all servers have said that they leave; their experts are in use until then."""
        return self._all_left.wait(timeout_s)

    def close(self) -> None:
        """Ends the thread and the connections; a second call does nothing."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._waker.send(b"\0")
        if self._thread.is_alive():
            self._thread.join(STOP_GRACE_S)
        for peer in self._peers.values():
            peer.connection.close()
        self._waker.close()
        self._woken.close()
        self._selector.close()

    # --- on the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        next_heartbeat_s = time.monotonic()
        while not self._is_closed.is_set():
            for key, _ in self._selector.select(max(0.0, next_heartbeat_s - time.monotonic())):
                if key.data is None:
                    return
                self._read(key.data)
            now = time.monotonic()
            if now >= next_heartbeat_s:
                if now > next_heartbeat_s + 2 * HEARTBEAT_S:  # it was this process that stood still
                    self._forgive(now)
                next_heartbeat_s = now + HEARTBEAT_S
                self.tell(Alive())
                self._look_for_silence(now)
            if self._ends_s is not None and now > self._ends_s:
                _end_now()

    def _read(self, peer: _Peer) -> None:
        try:
            for message in peer.receive():
                if isinstance(message, Wish):
                    self._listener.heard(peer.rank, message)
                elif isinstance(message, Leaving):
                    self._note_left(peer.rank)
                    self._listener.leaving(peer.rank)
        except (OSError, EOFError):
            self._selector.unregister(peer.connection)
            peer.is_gone = True
            if not (self._has_left(self.rank) and self._has_left(peer.rank)):
                self._lose(f"{self._names[peer.rank]} has ended")
        except WireError as error:
            self._selector.unregister(peer.connection)
            peer.is_gone = True
            self._lose(f"{self._names[peer.rank]} sent what can't be read: {error.message}")

    def _forgive(self, now: float) -> None:
        for peer in self._peers.values():
            peer.heard_s = now

    def _look_for_silence(self, now: float) -> None:
        for peer in self._peers.values():
            silent_s = now - peer.heard_s
            if not peer.is_gone and silent_s > self._silence_s:
                self._lose(f"{self._names[peer.rank]} has said nothing for {silent_s:.0f} s")

    def _note_left(self, rank: int) -> None:
        self._left.add(rank)
        if len(self._left) == self.size // self._each:
            self._all_left.set()

    def _has_left(self, rank: int) -> bool:
        return rank - rank % self._each in self._left

    def _lose(self, what: str) -> None:
        if self.lost is not None:
            return
        self.lost = GroupLostError(f"{what}; no rank of its group computes without it, so this one ends too")
        self._ends_s = time.monotonic() + STOP_GRACE_S
        log.error("%s", self.lost.message)
        self._all_left.set()
        self._listener.lost(self.lost)


class _Peer:
    """Another process of the group."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self.heard_s = time.monotonic()
        self.is_gone = False
        self._buffer = bytearray()
        self._lock = threading.Lock()

    def send(self, frame: bytes) -> None:
        """A frame is far smaller than the kernel's buffer, which a process that lives empties at once."""
        with self._lock:
            try:
                sent = self.connection.send(frame)
            except OSError:
                return
            if sent < len(frame):  # the rest would come in the middle of another
                self.connection.shutdown(socket.SHUT_RDWR)

    def receive(self) -> Iterable[object]:
        """The messages that have come. Raises :class:`EOFError`, :class:`OSError`, :class:`WireError`."""
        data = self.connection.recv(MAX_MESSAGE_BYTES)
        if not data:
            raise EOFError
        self.heard_s = time.monotonic()
        self._buffer += data
        while len(self._buffer) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + _length(self._buffer)
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[_LENGTH_BYTES:end])
            del self._buffer[:end]
            yield decode(message, Wish, Alive, Leaving)


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
        connection = socket.create_connection(addresses(other), CONNECT_TIMEOUT_S)
        _send(connection, hello)
        theirs = _receive(connection, Hello)
        _compare(hello, theirs, names)
        connections[other] = connection
    while len(connections) < len(names) - 1:
        missing = [names[other] for other in range(len(names)) if other not in (rank, *connections)]
        listening.settimeout(max(0.1, deadline_s - time.monotonic()))
        try:
            connection, peer_address = listening.accept()
        except TimeoutError:
            raise DeadlineError(f"{', '.join(missing)} did not come; start all ranks of a group") from None
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            theirs = _receive(connection, Hello)
        except (OSError, EOFError, WireError) as error:
            log.warning("%s called and is no rank: %s", host_port(*peer_address[:2]), error)
            connection.close()
            continue
        if theirs.secret != hello.secret or not rank < theirs.rank < len(names):
            log.warning("%s called and is no rank of this group", host_port(*peer_address[:2]))
            connection.close()
            continue
        _send(connection, hello)
        _compare(hello, theirs, names)
        connections[theirs.rank] = connection
    for connection in connections.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connections


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
    connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


def _receive(connection: socket.socket, expected: type[Hello]) -> Hello:
    length = _length(_read_exactly(connection, _LENGTH_BYTES))
    return decode(_read_exactly(connection, length), expected)


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError("the connection was closed")
        data += part
    return data


def _length(data: bytes | bytearray) -> int:
    length = int.from_bytes(data[:_LENGTH_BYTES], "big")
    if length > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {length} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    return length


def _end_now() -> None:
    """A thread of this process waits inside a collective for somebody who is gone."""
    log.error("no clean stop within %g s; ending", STOP_GRACE_S)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)
