"""A queue of one reader, who takes what has arrived together: all of it, or a slice if it is much."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Events of one HTTP request. What arrives together is read together, so it leaves in one write."""

    def __init__(self, changed: Callable[[int], None]) -> None:
        """``changed`` is told by how much the weight grows or shrinks."""
        self._changed = changed
        self._items: deque[tuple[T, int]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False
        self.weight = 0
        """Of all items that wait."""

    @property
    def is_awaited(self) -> bool:
        """Whether its reader waits and nothing has come yet."""
        return self._waiter is not None and not self._items

    def put(self, item: T, weight: int = 1) -> None:
        if self._is_closed:
            return
        self._items.append((item, weight))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self.weight += weight
        self._changed(weight)

    async def wait(self) -> bool:
        """Until there is an item; whether that took a wait."""
        if self._items:
            return False
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        return True

    def take(self, max_weight: int) -> list[T]:
        """The items that came first: at least one, if there is any, and no more than weigh ``max_weight``."""
        items: list[T] = []
        taken = 0
        while self._items and (not items or taken + self._items[0][1] <= max_weight):
            item, weight = self._items.popleft()
            items.append(item)
            taken += weight
        self.weight -= taken
        self._changed(-taken)
        return items

    def close(self, last: T | None = None) -> None:
        """Drops what waits, and all that comes. ``last`` is what its reader finds instead."""
        self._items.clear()
        self._changed(-self.weight)
        self.weight = 0
        if last is not None:
            self.put(last)
        self._is_closed = True


log = logging.getLogger(__name__)

MAX_WEIGHT = 1 << 20
"""Some 110 MB: a log-probability that waits is three Python objects."""


class Backlog:
    """Bounds the sum of all inboxes by ending the request that has the most in its own.

    Log-probabilities come as fast as servers compute them, whether the client takes them or not: hundreds of
    megabytes in the minute after which a client that takes nothing is given up.
    """

    def __init__(self, max_weight: int = MAX_WEIGHT) -> None:
        self._max_weight = max_weight
        self._owners: dict[Inbox[Any], Callable[[], None]] = {}
        self.weight = 0

    @contextmanager
    def of(self, inbox: Inbox[Any], end: Callable[[], None]) -> Iterator[None]:
        """The life of an inbox, which tells :meth:`changed` its weight; ``end`` closes it before its time."""
        self._owners[inbox] = end
        try:
            yield
        finally:
            del self._owners[inbox]
            inbox.close()

    def changed(self, weight: int) -> None:
        self.weight += weight
        if weight > 0 and self.weight > self._max_weight:
            self._end_heaviest()

    def _end_heaviest(self) -> None:
        heaviest = max(self._owners, key=lambda inbox: inbox.weight)
        log.warning("answers that clients have not taken weigh %d: the heaviest one ends", self.weight)
        self._owners[heaviest]()
