"""The messages between the processes of a group, and the end of the group when a connection breaks.

A group consists of servers that compute in lockstep, or of the ranks of one server on several hosts. Every
process has one TCP connection to every other process. Connections carry a few bytes per step
(:mod:`engine.group.lockstep`) and, once a second, a sign that the sender is alive. If a process is gone, its
connections close; if it is frozen, it sends nothing any more. In both cases the other processes can't compute
without its results. Each of them logs one line and stops. A process that can't stop, because one of its
threads waits inside a collective operation, kills itself.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from engine.group.connections import LENGTH_BYTES, MAX_MESSAGE_BYTES, length_of
from wire.codec import decode, encode
from wire.errors import GroupLostError, WireError
from wire.http.address import host_port
from wire.messages.group import Alive, Leaving, Wish

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SILENCE_S = 8.0
"""A process that has sent nothing for this long counts as frozen."""
START_SILENCE_S = 120.0
"""The same limit while models are loaded and kernels compiled: some of this work does not let other threads
of the interpreter run."""
STOP_GRACE_S = 3.0
"""Time for a clean stop once the group is lost."""


class Listener:
    """Gets the messages and events of a mesh. This class ignores them all."""

    def heard(self, rank: int, wish: Wish) -> None:
        """Takes another rank's wish. Raises :class:`WireError` if the wish is impossible."""

    def leaving(self, rank: int) -> None:
        """Another server of a lockstep group, or another rank of this server, has nothing left to compute."""

    def lost(self, error: GroupLostError) -> None:
        """The group is lost because a process is gone. Called once."""


class GroupMesh:
    """The connections of one process. The mesh's own thread reads. Any thread may send, and never waits."""

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        *,
        names: Sequence[str],
        each: int,
    ) -> None:
        """``each``: number of processes, with consecutive numbers, that leave the group together.

        In a lockstep group these are the ranks of one server; between hosts each rank leaves alone. The first
        of them calls :meth:`leave`.
        """
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
        """Starts to read. ``listener`` is called on the mesh's thread."""
        self._listener = listener
        self._thread.start()

    def watch_closely(self) -> None:
        """Allows only :data:`SILENCE_S` of silence from now on, because all processes are ready to serve."""
        self._silence_s = SILENCE_S

    def tell(self, message: object, ranks: Iterable[int] | None = None) -> None:
        """Sends a message to the given ranks, or to all other ranks. If a connection is broken, the thread
        that reads notices it."""
        data = encode(message)
        frame = len(data).to_bytes(LENGTH_BYTES, "big") + data
        for rank in self._peers if ranks is None else ranks:
            self._peers[rank].send(frame)

    def leave(self) -> None:
        """Tells the other processes that this server, or this rank of a server on several hosts, has nothing
        left to compute. Connections may close after that."""
        self._note_left(self.rank)
        self.tell(Leaving())

    def wait_until_all_left(self, timeout_s: float) -> bool:
        """Waits until the whole group has said that it leaves. Until then a lockstep group needs this server.

        Returns whether that took at most ``timeout_s``. Returns true at once if the group is lost.
        """
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
                if now > next_heartbeat_s + 2 * HEARTBEAT_S:  # this process was paused, not the others
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
            sender = f"{self._names[peer.rank]} at {peer.address}"
            self._lose(f"{sender} sent a message that can't be read: {error.message}")

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


def _address_of(connection: socket.socket) -> str:
    try:
        host, port, *_ = connection.getpeername()
    except (OSError, ValueError):  # the peer has gone, or this is a socket pair
        return "an unknown address"
    return host_port(host, port)


class _Peer:
    """Another process of the group."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.connection = connection
        self.heard_s = time.monotonic()
        self.is_gone = False
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self.address = _address_of(connection)

    def send(self, frame: bytes) -> None:
        """Sends a frame without waiting.

        A frame is far smaller than the operating system's buffer, which a live process empties at once.
        """
        with self._lock:
            try:
                sent = self.connection.send(frame)
            except OSError:
                return
            if sent < len(frame):  # the rest can't be sent later: another frame may be in between
                self.connection.shutdown(socket.SHUT_RDWR)

    def receive(self) -> Iterable[object]:
        """Yields the messages that have arrived.

        Raises :class:`EOFError` or :class:`OSError` if the process is gone, :class:`WireError` for a message
        that can't be read.
        """
        data = self.connection.recv(MAX_MESSAGE_BYTES)
        if not data:
            raise EOFError
        self.heard_s = time.monotonic()
        self._buffer += data
        while len(self._buffer) >= LENGTH_BYTES:
            end = LENGTH_BYTES + length_of(self._buffer)
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[LENGTH_BYTES:end])
            del self._buffer[:end]
            yield decode(message, Wish, Alive, Leaving)


def _end_now() -> None:
    """Ends this process: one of its threads waits inside a collective for a process that is gone."""
    log.error("no clean stop within %g s; ending", STOP_GRACE_S)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)
