"""A queue of one reader that takes everything that has arrived at once."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Events of one HTTP request. What arrives together is read together, so it leaves in one write."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether its reader waits and nothing has come yet."""
        return self._waiter is not None and not self._items

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take_all(self) -> list[T]:
        """All items there are, at least one."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items
