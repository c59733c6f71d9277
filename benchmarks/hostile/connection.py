"""A hostile client's connection: a raw socket, which costs almost nothing compared with what it attacks.

Requests are bytes that were built beforehand. Answers are counted and dropped.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

CHUNK_BYTES = 1 << 18
HEAD_END = b"\r\n\r\n"
IP_BIND_ADDRESS_NO_PORT = 24
"""Linux's number; Python 3.11 has no name for it."""


def post(path: str, body: Mapping[str, object] | bytes) -> bytes:
    """Returns a whole request, the only one of its connection."""
    data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    return _head(path, len(data)) + b"Connection: close\r\n\r\n" + data


def post_unfinished(path: str, num_bytes: int) -> bytes:
    """Returns a request with only the first byte of its body."""
    return _head(path, num_bytes) + b"\r\n{"


def _head(path: str, num_bytes: int) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {num_bytes}\r\n".encode()


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()


class Connection:
    """Sends bytes, and reads and drops answers. All methods raise :class:`OSError` if the connection
    breaks."""

    def __init__(self, own: socket.socket) -> None:
        self._own = own
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(CHUNK_BYTES)

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._own, data)

    async def status(self) -> int:
        """Returns the answer's status; reads its head and the data that came with it."""
        head = await self.read_until(HEAD_END)
        return int(head.split(None, 2)[1])

    async def read_until(self, wanted: bytes) -> bytes:
        """Returns all data up to the read that contained ``wanted``. Raises :class:`ConnectionError` if the
        connection ends."""
        found = b""
        while wanted not in found:
            count = await self.read()
            if not count:
                raise ConnectionError("the server closed the connection")
            found += self._buffer[:count]
        return found

    async def read(self, most: int = CHUNK_BYTES) -> int:
        """Reads and drops data; returns the number of bytes, 0 at the end."""
        return await self._loop.sock_recv_into(self._own, memoryview(self._buffer)[:most])

    async def drain(self) -> int:
        """Reads to the end; returns the number of bytes."""
        total = 0
        while count := await self.read():
            total += count
        return total

    def reset(self) -> None:
        """Closes abruptly: the peer gets a RST."""
        self._own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._own.close()


@asynccontextmanager
async def connected(
    address: str, *, source: str = "", receive_buffer: int | None = None
) -> AsyncIterator[Connection]:
    """Opens a connection for the block, from the address ``source``, or from any.

    ``receive_buffer``: bytes that the kernel buffers for us.
    """
    host, _, port = address.rpartition(":")
    own = socket.socket()
    try:
        own.setblocking(False)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_buffer is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        if source:
            own.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)  # a port may serve many connections
            own.bind((source, 0))
        await asyncio.get_running_loop().sock_connect(own, (host, int(port)))
        yield Connection(own)
    finally:
        own.close()
