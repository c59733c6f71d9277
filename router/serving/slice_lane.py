"""Lets requests with much work take turns on the event loop. The work of one turn is called a slice."""

from __future__ import annotations

import asyncio
from collections import deque

SLICE_WEIGHT = 1024
"""The maximum weight of a slice. Work with a weight of 1 takes a microsecond or two. What one step adds to
one choice has a weight of :data:`OUTPUT_WEIGHT`, and 1 more for each token and each log-probability."""
OUTPUT_WEIGHT = 8
LIGHT_WEIGHT = SLICE_WEIGHT // 4
"""Work up to this weight does not wait for a turn. Nearly all requests have less work at a time."""


class SliceLane:
    """A queue that lets one slice run in each iteration of the event loop.

    So all other work that is due runs between two slices: other streams' tokens, probes, new connections. A
    request with more work than one slice joins the end of the queue again after each slice.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_moving = False

    async def turn(self) -> None:
        """Wait until the caller may run one slice."""
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        if not self._is_moving:
            self._is_moving = True
            loop.call_soon(self._move, loop)
        await mine

    def _move(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # otherwise its request is gone
                first.set_result(None)
                loop.call_soon(self._move, loop)
                return
        self._is_moving = False
