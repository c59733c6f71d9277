"""The stored responses of one client. Clients take turns at the store.

One thread reads and writes the store, and a call may take a tenth of a second: to continue thousands of
responses, for example. Without turns, the calls of one client could delay those of all others by minutes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from router.access.client import Client
from router.api.responses.response_store import ResponseStore, StoredResponse
from router.http.bodies.turn_lane import TurnLane
from wire.errors import OverloadedError
from wire.repeated_lines import RepeatedLines

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

MAX_CALLS = 1024
"""How many calls may be under way or wait for their turn."""
RETRY_AFTER_S = 1


class StoreTurns:
    """Gives one client after the other a turn at the store. One client may have half of the calls that others
    leave room for, as with bodies (:mod:`router.http.bodies.body_room`)."""

    def __init__(self, max_calls: int = MAX_CALLS) -> None:
        self._max_calls = max_calls
        self._lane = TurnLane()
        self._calls: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for a turn of ``client``, which lasts as long as the ``async with`` block. Raises
        :class:`OverloadedError` if too many calls of this client wait."""
        of_others = self._calls.total() - self._calls[client]
        limit = (self._max_calls - of_others) // 2
        if self._calls[client] >= limit:
            raise OverloadedError(
                f"{self._calls[client]} calls of this client wait for stored responses, the limit is "
                f"{limit}: send the request again in {RETRY_AFTER_S} s, or send fewer at a time",
                retry_after_s=RETRY_AFTER_S,
            )
        self._calls[client] += 1
        try:
            async with self._lane.turn(client):
                yield
        finally:
            self._calls[client] -= 1
            if not self._calls[client]:
                del self._calls[client]


@dataclass(frozen=True)
class OwnResponses:
    """The store, as one client sees it. Methods raise what those of :class:`ResponseStore` raise, and
    :class:`OverloadedError`."""

    store: ResponseStore
    turns: StoreTurns
    client: Client

    @property
    def keeps(self) -> bool:
        return self.store.keeps

    @property
    def _owner(self) -> str:
        return self.client.api_key.name

    async def save(self, response: StoredResponse) -> None:
        """Store a response. If that is impossible, it is logged: the answer goes out all the same."""
        try:
            async with self.turns.turn(self.client.name):
                await self.store.save(self._owner, response)
        except OverloadedError as error:
            lines.write(
                logging.ERROR,
                "response not stored",
                "response %s is not stored: %s",
                *(response.id, error.message),
            )

    async def find(self, response_id: str) -> StoredResponse:
        async with self.turns.turn(self.client.name):
            return await self.store.find(self._owner, response_id)

    async def conversation(self, response_id: str) -> list[StoredResponse]:
        async with self.turns.turn(self.client.name):
            return await self.store.conversation(self._owner, response_id)

    async def delete(self, response_id: str) -> None:
        async with self.turns.turn(self.client.name):
            await self.store.delete(self._owner, response_id)
