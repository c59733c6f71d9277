"""Takes turns among requests that have much to do on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque

SLICE_WEIGHT = 1024
"""Most work of one turn, a microsecond or two each: what a request's news of one step weighs is
:data:`OUTPUT_WEIGHT` a choice and 1 a log-probability."""
OUTPUT_WEIGHT = 8
LIGHT_WEIGHT = SLICE_WEIGHT // 4
"""What weighs no more waits for no turn: nearly all requests' news."""


class SliceLane:
    """Lets one slice run a turn of the event loop, those that wait one after the other.

    So whatever else is due runs between any two slices: other streams' tokens, probes, new connections. A
    request that has more to do than a slice stands in line again, behind all others.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_moving = False

    async def turn(self) -> None:
        """Waits until the caller may run one slice."""
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
            if not first.done():  # else its request is gone
                first.set_result(None)
                loop.call_soon(self._move, loop)
                return
        self._is_moving = False
