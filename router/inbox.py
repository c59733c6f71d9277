"""A queue of one reader that takes everything that has arrived at once."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from wire.errors import DeadlineError

T = TypeVar("T")


class Inbox(Generic[T]):
    """Events of one HTTP request. What arrives together is read together, so it leaves in one write."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take_all(self, deadline: float) -> list[T]:
        """All items there are, at least one. Raises :class:`DeadlineError` at the loop time ``deadline``."""
        if not self._items:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_at(deadline, _expire, self._waiter)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        items, self._items = self._items, []
        return items


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(DeadlineError("the request was not finished within its time limit"))
