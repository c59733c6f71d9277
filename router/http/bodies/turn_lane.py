"""Clients take turns with what is done in one go on the event loop: parsing a body, beginning a request.

Two hundred requests that come at once take the loop half a second, in which it answers nobody else, unless it
does other things in between. A body of eight megabytes takes it 30 ms: three clients that send one after the
other would have a third of all its time, and decode steps on the same cores would wait as well.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

ClientOf = Callable[[HTTPConnection], str]
"""Names the client that a request is from."""

LARGE_BODY_BYTES = 256 << 10
"""Nearly all bodies are smaller."""
LARGE_BODY_PAUSE = 19.0
"""So large bodies get a twentieth of the loop's time: megabytes a second, far more than is prefilled."""


class TurnLane:
    """One turn after the other, each client's one by one. Belongs to one event loop."""

    def __init__(self, pause: float = 0.0) -> None:
        """Behind a turn is a pause of ``pause`` times its length: without one, the next turn is in the event
        loop's next iteration, with all else that is due then."""
        self._pause = pause
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By client; whose turn is next is first."""
        self._is_busy = False
        """From the begin of a turn to the end of the pause behind it."""

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Waits until it is the turn of ``client``, which lasts as long as the block, in which nothing is
        waited for."""
        if self._is_busy:
            await self._wait(client)
        self._is_busy = True
        began_s = time.perf_counter()
        try:
            yield
        finally:
            pause_s = self._pause * (time.perf_counter() - began_s)
            asyncio.get_running_loop().call_later(pause_s, self._next)

    async def _wait(self, client: str) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._next()  # its turn had come
            raise

    def _next(self) -> None:
        """The next client's turn; each that has had one stands behind all others."""
        while self._waiting:
            client = next(iter(self._waiting))
            turns = self._waiting.pop(client)
            first = turns.popleft()
            if turns:
                self._waiting[client] = turns
            if not first.done():  # else its request is gone
                first.set_result(None)
                return
        self._is_busy = False


class BeginningsMiddleware:
    """Pure ASGI: lets one POST begin in an iteration of the event loop, clients in turns.

    What a request has to do until it waits for something, it does in one go: it is read, checked and sent to
    a server. Two hundred that come at once take the loop half a second. Probes don't wait for that.
    """

    def __init__(self, app: ASGIApp, *, lane: TurnLane, client_of: ClientOf) -> None:
        self._app = app
        self._lane = lane
        self._client_of = client_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            async with self._lane.turn(self._client_of(HTTPConnection(scope))):
                pass  # it goes on until it has to wait; the next one's turn is in the next iteration
        await self._app(scope, receive, send)
