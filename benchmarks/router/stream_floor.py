"""What a message of a stream costs its reader, over gRPC and over a plain TCP connection.

    python -m benchmarks.router.stream_floor

A router reads one message for each step of each decode server. This is the least that a message can cost on
its event loop: nothing is decoded. Figures are CPU time of the reading process, all threads, a message.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import uvloop

from twinfang.stack.ports import free_ports
from wire.rpc import open_channel
from wire.server import GrpcServer

MESSAGE = bytes(1500)
"""About as long as the message of a step with a hundred rows."""
RATE = 100.0
"""Messages a second: two servers that take a step every 20 ms."""
DURATION_S = 5.0
HEAD_BYTES = 4
START_TIMEOUT_S = 60.0
SERVICE = "twinfang.Floor"


async def write_grpc(port: int) -> None:
    async def stream(_requests: Any, _context: Any) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(1 / RATE)
            yield MESSAGE

    server = GrpcServer("127.0.0.1", port)
    server.add_service(SERVICE, {"Stream": grpc.stream_stream_rpc_method_handler(stream)})
    await server.start()
    await asyncio.Event().wait()


async def write_tcp(port: int) -> None:
    async def connected(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            await asyncio.sleep(1 / RATE)
            writer.write(len(MESSAGE).to_bytes(HEAD_BYTES, "little") + MESSAGE)

    async with await asyncio.start_server(connected, "127.0.0.1", port) as server:
        await server.serve_forever()


async def read_grpc(port: int, count: Callable[[], None]) -> None:
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stream: Any = channel.stream_stream(f"/{SERVICE}/Stream")()
        while await stream.read() is not grpc.aio.EOF:
            count()


class Reader(asyncio.Protocol):
    """Divides what comes into messages."""

    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= HEAD_BYTES:
            end = HEAD_BYTES + int.from_bytes(self._data[:HEAD_BYTES], "little")
            if len(self._data) < end:
                return
            self._data = self._data[end:]
            self._count()


async def read_tcp(port: int, count: Callable[[], None]) -> None:
    await asyncio.get_running_loop().create_connection(lambda: Reader(count), "127.0.0.1", port)
    await asyncio.Event().wait()


async def cost_s(read: Callable[[int, Callable[[], None]], Any], port: int) -> float:
    num_read = 0

    def count() -> None:
        nonlocal num_read
        num_read += 1

    reading = asyncio.create_task(read(port, count))
    while num_read < RATE / 2:  # connected, and warm
        await asyncio.sleep(0.01)
    began, num_before = time.process_time(), num_read
    await asyncio.sleep(DURATION_S)
    took = (time.process_time() - began) / (num_read - num_before)
    reading.cancel()
    return took


def wait_for_port(port: int) -> None:
    """Waits until the writer, which has to import everything first, listens."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def serve(write: Callable[[int], Any], port: int) -> None:
    uvloop.run(write(port))


def main() -> None:
    for name, write, read in (("gRPC", write_grpc, read_grpc), ("TCP", write_tcp, read_tcp)):
        (port,) = free_ports(1)
        writer = multiprocessing.get_context("spawn").Process(target=serve, args=(write, port), daemon=True)
        writer.start()
        try:
            wait_for_port(port)
            took = uvloop.run(asyncio.wait_for(cost_s(read, port), 60))
        finally:
            writer.terminate()
        print(f"{name:5} {took * 1e6:6.0f} us a message")


if __name__ == "__main__":
    main()
