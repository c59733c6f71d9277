"""Lets clients take turns with work that blocks the event loop: parsing a body, beginning a request.

Two hundred requests that come at once take half a second of the loop's time. Without turns the loop would
answer nobody else meanwhile. Parsing a body of eight megabytes takes 30 ms: three clients, each of which
sends such bodies one after the other, would take a third of the loop's time, and decode steps on the same
cores would wait as well.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

LARGE_BODY_BYTES = 256 << 10
"""Larger bodies are parsed in turns. Nearly all bodies are smaller."""
LARGE_BODY_PAUSE = 19.0
"""With a pause of 19 times the turn's length, large bodies get a twentieth of the loop's time. That is enough
to parse megabytes a second, which is far more than servers can prefill."""

T = TypeVar("T")


class Turn:
    """One turn. Others begin when it has ended and its work has been paid for with a pause."""

    def __init__(self, pause: float, then: Callable[[], None]) -> None:
        self.has_ended = False
        self._pause = pause
        self._then = then
        self._paid_at_s = 0.0

    @contextmanager
    def work(self) -> Iterator[None]:
        """Time the block, which blocks the event loop."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            pause_s = self._pause * (time.perf_counter() - began_s)
            self._paid_at_s = max(self._paid_at_s, asyncio.get_running_loop().time()) + pause_s

    def end(self) -> None:
        """End the turn. A second call has no effect."""
        if not self.has_ended:
            self.has_ended = True
            loop = asyncio.get_running_loop()
            loop.call_later(max(self._paid_at_s - loop.time(), 0.0), self._then)


class TurnLane:
    """A queue that gives turns to one client after the other. It belongs to one event loop."""

    def __init__(self, pause: float = 0.0, *, num_turns: int = 1) -> None:
        """After each turn comes a pause of ``pause`` times the turn's length. With a pause of 0, the next
        turn is in the event loop's next iteration, together with all other work that is due then.
        ``num_turns``: turns at the same time."""
        self._pause = pause
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting turns by client. The client whose turn is next comes first."""
        self._num_free = num_turns
        """How many turns may begin now. Turns that are in progress, or pauses after them, are not over."""

    async def begin(self, client: str) -> None:
        """Wait until it is the turn of ``client``. The turn lasts until its task waits for something. To be
        called only on a lane without pauses."""
        await self._enter(client)
        asyncio.get_running_loop().call_soon(self._next)

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait until it is the turn of ``client``. The turn lasts as long as the ``async with`` block, which
        must not wait for anything."""
        turn = await self.take(client)
        try:
            with turn.work():
                yield
        finally:
            turn.end()

    async def take(self, client: str) -> Turn:
        """Wait until it is the turn of ``client``, and return the turn. It lasts until :meth:`Turn.end`."""
        await self._enter(client)
        return Turn(self._pause, self._next)

    async def run(self, client: str, work: Callable[[], Awaitable[T]]) -> T:
        """Wait until it is the turn of ``client``, and return the result of ``work``.

        The turn lasts until the work has ended, even if the caller is cancelled meanwhile. A thread or
        another process goes on with work whose result nobody wants any more, and then it is not free for
        others yet.
        """
        turn = await self.take(client)
        try:
            running = asyncio.ensure_future(work())
        except BaseException:
            turn.end()
            raise
        running.add_done_callback(lambda _: turn.end())
        return await asyncio.shield(running)

    async def _enter(self, client: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._next()  # its turn has come, but it was cancelled: pass the turn on
            raise

    def _next(self) -> None:
        """Give the next client its turn. A client that has had a turn comes after all other waiting
        clients."""
        while self._waiting:
            client = next(iter(self._waiting))
            turns = self._waiting.pop(client)
            first = turns.popleft()
            if turns:
                self._waiting[client] = turns
            if not first.done():  # otherwise its request is gone
                first.set_result(None)
                return
        self._num_free += 1
