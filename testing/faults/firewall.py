"""Rules of Linux's firewall (nftables) in one network namespace, set over netlink without any program.

A rule is a string of bytes: first the conditions that a packet must meet, then what happens to the packet.

    firewall = Firewall(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER))
    firewall.replace([between("10.0.1.2", "10.0.2.2") + DROP])

Layouts and numbers: linux/netfilter/nfnetlink.h and nf_tables.h.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Final

NETLINK_NETFILTER: Final = 12
_REPLY_DEADLINE_S: Final = 5.0

_REQUEST, _ACK, _APPEND, _CREATE = 0x1, 0x4, 0x800, 0x400
_NLMSG_ERROR: Final = 2
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NFTABLES: Final = 10
_NEW_TABLE, _DELETE_TABLE, _NEW_CHAIN, _NEW_RULE = 0, 2, 3, 6
_NESTED: Final = 0x8000
_HEADER: Final = struct.Struct("=IHHII")  # netlink: length, type, flags, sequence number, port
_FORWARD: Final = 2  # the hook for packets that are forwarded to another host
_VERDICT, _REGISTER = 0, 1
_TABLE, _CHAIN = "faults", "forward"


class FirewallError(Exception):
    """Linux refused a rule."""


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _nested(kind: int, *attributes: bytes) -> bytes:
    return _attribute(kind | _NESTED, b"".join(attributes))


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack(">I", value))


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode("ascii") + b"\0")


def _expression(name: str, *attributes: bytes) -> bytes:
    return _nested(1, _text(1, name), _nested(2, *attributes))


def _register_is(value: bytes) -> bytes:
    return _expression("cmp", _number(1, _REGISTER), _number(2, 0), _nested(3, _attribute(1, value)))


DROP: Final = _expression("immediate", _number(1, _VERDICT), _nested(2, _nested(2, _number(1, 0))))
"""Drops the packet silently."""
RESET: Final = _expression("reject", _number(1, 1), _attribute(2, b"\0"))
"""Answers TCP packets with a reset, as if nobody listened; drops packets of other protocols."""


def between(source: str, destination: str) -> bytes:
    """Matches packets from one IPv4 address to another."""
    addresses = _expression("payload", _number(1, _REGISTER), _number(2, 1), _number(3, 12), _number(4, 8))
    return addresses + _register_is(socket.inet_aton(source) + socket.inet_aton(destination))


def one_in(count: int) -> bytes:
    """Matches each packet with a chance of one in ``count``."""
    return _expression("numgen", _number(1, _REGISTER), _number(2, count), _number(3, 1)) + _register_is(
        bytes(4)
    )


class Firewall:
    """The rules for packets that a namespace forwards. ``netlink`` is a netfilter socket that was made in
    that namespace."""

    def __init__(self, netlink: socket.socket) -> None:
        self._socket = netlink
        self._socket.settimeout(_REPLY_DEADLINE_S)
        self._socket.bind((0, 0))
        self.replace([])

    def close(self) -> None:
        self._socket.close()

    def replace(self, rules: Sequence[bytes]) -> None:
        """Replaces all rules at once: no packet meets a partial set. Raises :class:`FirewallError`."""
        table = _text(1, _TABLE)
        hook = _nested(4, _number(1, _FORWARD), _number(2, 0))
        messages = [
            (_NEW_TABLE, _CREATE, table),  # so that the deletion that follows finds a table
            (_DELETE_TABLE, 0, table),
            (_NEW_TABLE, _CREATE, table),
            (_NEW_CHAIN, _CREATE, table + _text(3, _CHAIN) + hook + _text(7, "filter")),
            *((_NEW_RULE, _CREATE | _APPEND, table + _text(2, _CHAIN) + _nested(4, rule)) for rule in rules),
        ]
        batch = [_message(_BATCH_BEGIN, _REQUEST, 0)]
        for number, (kind, flags, body) in enumerate(messages, 1):
            batch.append(_message(_NFTABLES << 8 | kind, _REQUEST | _ACK | flags, number, body))
        batch.append(_message(_BATCH_END, _REQUEST, len(messages) + 1))
        self._socket.send(b"".join(batch))
        left = set(range(1, len(messages) + 1))
        while left:
            for number, code in _acknowledgements(self._socket.recv(1 << 16)):
                if code:
                    raise FirewallError(f"message {number} of {len(messages)}: {os.strerror(-code)}")
                left.discard(number)


def _message(kind: int, flags: int, number: int, body: bytes = b"") -> bytes:
    is_mark = kind in (_BATCH_BEGIN, _BATCH_END)
    family, subsystem = (socket.AF_UNSPEC, _NFTABLES) if is_mark else (socket.AF_INET, 0)
    body = struct.pack("=BBH", family, 0, socket.htons(subsystem)) + body
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, number, 0) + body


def _acknowledgements(data: bytes) -> Iterator[tuple[int, int]]:
    """Yields sequence number and error code, 0 or negative, of each acknowledgement."""
    while data:
        length, kind, _, number, _ = _HEADER.unpack_from(data)
        if kind == _NLMSG_ERROR:
            yield number, struct.unpack_from("=i", data, _HEADER.size)[0]
        data = data[(length + 3) & ~3 :]
