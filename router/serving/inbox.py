"""A queue with one reader, and a limit for all such queues together."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """The events of one HTTP request. Events that arrive together are read together, so that they are sent to
    the client in one write.

    Each event has a weight, which says roughly how much work and memory it needs.
    """

    def __init__(self, changed: Callable[[int], None]) -> None:
        """``changed`` is called with each change of :attr:`weight`; the change is negative if the weight
        shrinks."""
        self._changed = changed
        self._items: deque[tuple[T, int]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False
        self.is_awaited = False
        """Whether the reader waits and nothing has come yet."""
        self.weight = 0
        """The weight of all waiting items."""

    def put(self, item: T, weight: int = 1) -> None:
        if self._is_closed:
            return
        self._items.append((item, weight))
        self.is_awaited = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self.weight += weight
        self._changed(weight)

    async def wait(self) -> bool:
        """Wait until an item is there. Return False if an item was there already."""
        if self._items:
            return False
        self._waiter = asyncio.get_running_loop().create_future()
        self.is_awaited = True
        try:
            await self._waiter
        finally:
            self._waiter, self.is_awaited = None, False
        return True

    def take(self, max_weight: int) -> list[T]:
        """Take the oldest items: as many as weigh at most ``max_weight`` together, but at least one if any
        item waits."""
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
        """Drop all waiting items and all items that come later. Instead of them, the reader gets ``last``, if
        it is given."""
        self._items.clear()
        self._changed(-self.weight)
        self.weight = 0
        if last is not None:
            self.put(last)
        self._is_closed = True


log = logging.getLogger(__name__)

MAX_WEIGHT = 1 << 20
"""This weight is about 110 MB of memory, because a waiting log-probability has a weight of 1 and is three
Python objects."""


class Backlog:
    """Limits the weight of all inboxes together. If the sum exceeds the limit, the request with the heaviest
    inbox is ended.

    Log-probabilities come as fast as servers compute them, whether the client reads them or not. A client
    that reads nothing is given up after a minute; in that minute hundreds of megabytes may come.
    """

    def __init__(self, max_weight: int = MAX_WEIGHT) -> None:
        self._max_weight = max_weight
        self._owners: dict[Inbox[Any], Callable[[], None]] = {}
        self.weight = 0

    def add(self, inbox: Inbox[Any], end: Callable[[], None]) -> None:
        """Count an inbox until :meth:`remove`. The inbox reports its weight to :meth:`changed`. ``end`` is
        called to end the inbox's request early."""
        self._owners[inbox] = end

    def remove(self, inbox: Inbox[Any]) -> None:
        """Close an inbox that :meth:`add` has added."""
        del self._owners[inbox]
        inbox.close()

    def changed(self, weight: int) -> None:
        self.weight += weight
        if weight > 0 and self.weight > self._max_weight:
            self._end_heaviest()

    def _end_heaviest(self) -> None:
        heaviest = max(self._owners, key=lambda inbox: inbox.weight)
        log.warning("answers that clients have not read weigh %d: the heaviest one ends", self.weight)
        self._owners[heaviest]()
