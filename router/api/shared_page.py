"""A page that takes long to build, shared by all who wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from router.http.bodies.turn_lane import TurnLane

REST = 19.0
"""After a page, the builder rests for this many times the time that it took. So pages get a twentieth of the
event loop's time, however many clients ask for them."""
MAX_REST_S = 1.0


class SharedPage:
    """Nobody gets a page that was built before the request came: figures are never old."""

    def __init__(self, build: Callable[[], Awaitable[bytes]]) -> None:
        self._build = build
        self._next: asyncio.Task[bytes] | None = None
        self._building = asyncio.Lock()
        self._rests_until_s = 0.0
        self._answers = TurnLane()
        """One answer is sent in each iteration of the event loop."""

    async def get(self, client: str) -> bytes:
        """Return the next page. Raises what its building raised."""
        if self._next is None:
            self._next = asyncio.create_task(self._make())
        page = await asyncio.shield(self._next)
        await self._answers.begin(client)
        return page

    async def _make(self) -> bytes:
        loop = asyncio.get_running_loop()
        async with self._building:
            await asyncio.sleep(self._rests_until_s - loop.time())
            self._next = None  # who asks from now on gets a later page
            began_s = loop.time()
            try:
                return await self._build()
            finally:
                ended_s = loop.time()
                self._rests_until_s = ended_s + min(REST * (ended_s - began_s), MAX_REST_S)
