"""Turns by client with a limit of how many may wait for theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from router.http.bodies.turn_lane import TurnLane
from wire.errors import OverloadedError

RETRY_AFTER_S = 1

T = TypeVar("T")


class BoundedTurns:
    """Gives one client after the other a turn. One client may wait for half of the turns that others leave
    room for, as with bodies (:mod:`router.http.bodies.body_room`)."""

    def __init__(self, max_waiting: int, what: str, num_turns: int = 1) -> None:
        """``what`` are the turns for, in the plural: a refused client reads it. Up to ``max_waiting`` turns,
        including the ``num_turns`` at the same time, may be under way or waited for."""
        self._max_waiting = max_waiting
        self._what = what
        self._lane = TurnLane(num_turns=num_turns)
        self._waiting: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for a turn of ``client``, which lasts as long as the ``async with`` block. Raises
        :class:`OverloadedError` if too many of this client wait."""
        with self._place(client):
            async with self._lane.turn(client):
                yield

    async def run(self, client: str, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``work``, as :meth:`TurnLane.run` does. Raises :class:`OverloadedError` if too
        many of this client wait."""
        with self._place(client):
            return await self._lane.run(client, work)

    @contextmanager
    def _place(self, client: str) -> Iterator[None]:
        of_others = self._waiting.total() - self._waiting[client]
        limit = (self._max_waiting - of_others) // 2
        if self._waiting[client] >= limit:
            raise OverloadedError(
                f"{self._waiting[client]} {self._what} of this client wait, the limit is {limit}: send the "
                f"request again in {RETRY_AFTER_S} s, or send fewer at a time",
                retry_after_s=RETRY_AFTER_S,
            )
        self._waiting[client] += 1
        try:
            yield
        finally:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client]
