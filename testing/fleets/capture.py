"""A capture of the TCP connections on loopback: how each begins, and what can be read in it.

Needs the right to open packet sockets (CAP_NET_RAW).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

ETH_P_ALL = 3
PACKET_OUTGOING = 4
BUFFER_BYTES = 256 << 20
"""Of the socket: a busy machine reads late."""
POLL_S = 0.2
SYN, ACK = 0x02, 0x10

Ends = tuple[int, int]
"""Ports of the caller and of the side that was called."""


@dataclass
class Connection:
    """One connection that was opened during the capture."""

    called: bytearray = field(default_factory=bytearray)
    """What the caller sent."""
    answered: bytearray = field(default_factory=bytearray)

    @property
    def is_tls(self) -> bool:
        """Whether it begins with a ClientHello: a TLS record of kind handshake, with a first message of type
        1."""
        return self.called[:2] == b"\x16\x03" and self.called[5:6] == b"\x01"

    def has(self, text: bytes) -> bool:
        return text in self.called or text in self.answered


class Capture:
    """The connections since the capture began."""

    def __init__(self) -> None:
        self.connections: dict[Ends, Connection] = {}
        self._is_over = threading.Event()
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, 33, BUFFER_BYTES)  # SO_RCVBUFFORCE
        self._socket.bind(("lo", 0))
        self._socket.settimeout(POLL_S)
        self._thread = threading.Thread(target=self._run, name="capture")
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._socket.close()

    def to_ports(self, ports: set[int]) -> dict[Ends, Connection]:
        """Return the connections to these ports in which anything was sent."""
        return {
            ends: one
            for ends, one in self.connections.items()
            if ends[1] in ports and (one.called or one.answered)
        }

    def num_lost(self) -> int:
        """Return the number of packets that the kernel dropped since the last call: PACKET_STATISTICS."""
        statistics = self._socket.getsockopt(263, 6, 8)
        return int(struct.unpack("II", statistics)[1])

    def _run(self) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(TimeoutError):
                packet, (_, _, kind, *_) = self._socket.recvfrom(1 << 17)
                if kind != PACKET_OUTGOING:  # on loopback, each packet goes out and comes in
                    self._take(packet[14:])

    def _take(self, packet: bytes) -> None:
        if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            return
        segment = packet[(packet[0] & 15) * 4 : int.from_bytes(packet[2:4], "big") or None]
        source, target = struct.unpack("!HH", segment[:4])
        flags, data = segment[13], segment[(segment[12] >> 4) * 4 :]
        if flags & SYN and not flags & ACK:
            self.connections[source, target] = Connection()
        if not data:
            return
        if (one := self.connections.get((source, target))) is not None:
            one.called += data
        elif (one := self.connections.get((target, source))) is not None:
            one.answered += data


@contextlib.contextmanager
def capturing() -> Iterator[Capture]:
    """Captures inside the block. Without the right to, the test is skipped."""
    try:
        capture = Capture()
    except PermissionError:
        pytest.skip("needs CAP_NET_RAW for a capture of loopback")
    try:
        yield capture
    finally:
        capture.stop()
