"""Loopback ports that lead to ports of hosts, so that a test reaches a server without using the links."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable

from testing.splice import splice
from twinfang.stack.ports import LOOPBACK

STOP_DEADLINE_S = 5.0


class Relay:
    """Forwards bytes between connections, in a separate thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay")
        self._thread.start()
        self._connections: set[asyncio.Task[None]] = set()

    def open(self, port: int, connect: Callable[[], socket.socket]) -> None:
        """Opens a loopback port. Its connections lead to the end that ``connect`` reaches."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
            with contextlib.suppress(OSError), contextlib.closing(writer):
                far = await asyncio.to_thread(connect)
                far_reader, far_writer = await asyncio.open_connection(sock=far)
                with contextlib.closing(far_writer):
                    await splice((reader, writer), (far_reader, far_writer))

        asyncio.run_coroutine_threadsafe(asyncio.start_server(serve, LOOPBACK, port), self._loop).result(
            STOP_DEADLINE_S
        )

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(STOP_DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_DEADLINE_S)
        self._loop.close()

    async def _end(self) -> None:
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
