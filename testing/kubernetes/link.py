"""A connection from one loopback port to another that can be cut and repaired."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any

from testing.splice import splice
from twinfang.stack.ports import LOOPBACK, free_ports

DEADLINE_S = 5.0


class Link:
    """Forwards bytes between the two ports, in a separate thread."""

    def __init__(self, far_port: int) -> None:
        (self.port,) = free_ports(1)
        self._far_port = far_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link")
        self._thread.start()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.mend()

    def mend(self) -> None:
        """Accepts connections from now on, always on the same port."""
        if self._server is None:
            self._do(self._listen())

    def cut(self) -> None:
        """Breaks existing connections and refuses new ones."""
        self._do(self._end())

    def close(self) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    def _do(self, action: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(action, self._loop).result(DEADLINE_S)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, LOOPBACK, self.port)

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        with contextlib.suppress(OSError), contextlib.closing(writer):
            far_reader, far_writer = await asyncio.open_connection(LOOPBACK, self._far_port)
            with contextlib.closing(far_writer):
                await splice((reader, writer), (far_reader, far_writer))
