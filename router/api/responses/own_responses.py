"""The stored responses of one client. Clients take turns at the store.

One thread reads and writes the store, and a call may take a tenth of a second: to continue thousands of
responses, for example. Without turns, the calls of one client could delay those of all others by minutes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from router.access.client import Client
from router.api.responses.response_store import ResponseStore, StoredResponse
from router.http.bodies.bounded_turns import BoundedTurns
from wire.errors import OverloadedError
from wire.repeated_lines import RepeatedLines

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

MAX_CALLS = 1024
"""How many calls may be under way or wait for their turn."""


def store_turns(max_calls: int = MAX_CALLS) -> BoundedTurns:
    """Return the turns at the store that all clients share."""
    return BoundedTurns(max_calls, "calls for stored responses")


@dataclass(frozen=True)
class OwnResponses:
    """The store, as one client sees it. Methods raise what those of :class:`ResponseStore` raise, and
    :class:`OverloadedError`."""

    store: ResponseStore
    turns: BoundedTurns
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
