"""Limits the memory of all bodies that are being read and checked at one time.

``--max-body-size`` limits one body, and the queue limits the requests that wait after the checks. But neither
limits all bodies together before the checks: a thousand clients, each with a body of the maximum size, would
fill the memory.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Scope

from router.heap import give_back
from router.http.bodies.turn_lane import LARGE_BODY_PAUSE, Turn, TurnLane
from wire.errors import OverloadedError

BODIES_AT_ONCE = 16
"""How many bodies of the maximum size there is room for. One client may have half of them."""
FREE_BYTES = 64 << 10
"""The part of each body that is not counted, so that small requests are never refused because of large
ones."""
RETRY_AFTER_S = 2
TRIM_AFTER_S = 5.0
MAX_TURN_S = 2.0
"""How long a large body may keep others waiting. For example, its grammar may take seconds to compile."""

_IN_STATE = "body_share"


class BodyRoom:
    """The room for bodies. A body that finds no room is refused at once: if it waited, it might wait for
    clients that send slowly.

    The bodies of one client may take half of the room that other clients leave. So the first client may have
    half of the whole room, the next client half of the rest, and no client all of it (this scheme is known as
    dynamic thresholds: Choudhury and Hahne, 1998).
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.large_bodies = TurnLane(LARGE_BODY_PAUSE)
        """The turns in which large bodies are parsed."""
        self.num_bytes = 0
        self._of: Counter[str] = Counter()
        """Bytes taken by each client."""
        self._trim: asyncio.TimerHandle | None = None

    def limit(self, client: str) -> int:
        """Return how many bytes the bodies of ``client`` may have together, given the bodies of all
        others."""
        return (self.max_bytes - self.num_bytes + self._of[client]) // 2

    def take(self, client: str, num_bytes: int) -> None:
        """Take room. Raises :class:`OverloadedError` if there is no room for ``num_bytes`` more."""
        if self._of[client] + num_bytes > self.limit(client):
            raise OverloadedError(
                f"the bodies of this client that the router is reading have {self._of[client]} bytes "
                f"together, the limit is {self.limit(client)}, half of what others leave of "
                f"{self.max_bytes}: send the request again in {RETRY_AFTER_S} s, or send fewer at a time",
                retry_after_s=RETRY_AFTER_S,
            )
        self._of[client] += num_bytes
        self.num_bytes += num_bytes

    def give_back(self, client: str, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._of[client] -= num_bytes
        if not self._of[client]:
            del self._of[client]

    def trim_soon(self) -> None:
        """Have the C library return free memory to the system after a while, however many calls follow."""
        if self._trim is None:
            self._trim = asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._trim_now)

    def _trim_now(self) -> None:
        self._trim = None
        asyncio.get_running_loop().run_in_executor(None, give_back)


class BodyShare:
    """The room that one request's body takes, from its first byte until :meth:`give_back` or :meth:`end`."""

    def __init__(self, room: BodyRoom, client: str) -> None:
        self._room = room
        self._client = client
        self._num_read = 0
        self._num_taken = 0
        self._was_large = False
        self._turn: Turn | None = None

    def take(self, num_bytes: int) -> None:
        """Take room for bytes that were read. Raises :class:`OverloadedError` if there is none left."""
        self._num_read += num_bytes
        num_new = max(self._num_read - FREE_BYTES, 0) - self._num_taken
        if num_new:
            self._room.take(self._client, num_new)
            self._num_taken += num_new

    def give_back(self) -> None:
        """Give the room back, because the body has become a checked request or an error. A second call has no
        effect."""
        if self._num_taken:
            self._was_large = True
            self._room.give_back(self._client, self._num_taken)
        self._num_taken = 0
        if self._turn is not None:
            self._turn.end()

    def end(self) -> None:
        """Give the room back because the request has ended. What was made of a large body is free only
        now."""
        self.give_back()
        if self._was_large:
            self._room.trim_soon()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for this client's turn to parse a large body, which the ``async with`` block does.

        The turn lasts until the room is given back, :data:`MAX_TURN_S` at most: what one large body becomes
        on its way to a checked request takes several times the body's memory, and small objects that stay
        would keep most of it if several bodies were on that way at once.
        """
        if self._turn is None or self._turn.has_ended:
            self._turn = await self._room.large_bodies.take(self._client)
            asyncio.get_running_loop().call_later(MAX_TURN_S, self._turn.end)
        with self._turn.work():
            yield

    def put_into(self, scope: Scope) -> None:
        scope.setdefault("state", {})[_IN_STATE] = self


def share_of(scope: Scope) -> BodyShare:
    """Return the share of a request's body. An endpoint gives the share back as soon as it no longer needs
    the body, since the answer may take much longer."""
    share: BodyShare = scope["state"][_IN_STATE]
    return share
