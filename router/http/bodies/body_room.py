"""The memory of all bodies that are being read and checked at one time.

One body is bounded by ``--max-body-size``, and what waits behind the checks by the queue. Between the two, a
thousand clients with a body of the largest size each would fill the memory.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AbstractAsyncContextManager

from starlette.types import Scope

from router.heap import give_back
from router.http.bodies.turn_lane import LARGE_BODY_PAUSE, TurnLane
from wire.errors import OverloadedError

BODIES_AT_ONCE = 16
"""So many of the largest size have room, half of them of one client."""
FREE_BYTES = 64 << 10
"""Of each body: small requests are never refused for large ones, nor counted."""
RETRY_AFTER_S = 2
TRIM_AFTER_S = 5.0

_IN_STATE = "body_share"


class BodyRoom:
    """Says no at once when it is full: one that waited for room could wait for clients that send slowly.

    A client's bodies may have as much together as is left free beside them. So the first has half, whoever
    comes then half of the rest, and nobody all of it (dynamic thresholds: Choudhury and Hahne, 1998).
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.large_bodies = TurnLane(LARGE_BODY_PAUSE)
        """In which they are parsed."""
        self.num_bytes = 0
        self._of: Counter[str] = Counter()
        """By client."""
        self._trim: asyncio.TimerHandle | None = None

    def limit(self, client: str) -> int:
        """What the bodies of ``client`` may have together, beside those of all others."""
        return (self.max_bytes - self.num_bytes + self._of[client]) // 2

    def take(self, client: str, num_bytes: int) -> None:
        """Raises :class:`OverloadedError` if there is no room for that many more."""
        if self._of[client] + num_bytes > self.limit(client):
            raise OverloadedError(
                f"the bodies of this client's requests that are being read have {self._of[client]} bytes "
                f"together, the limit is {self.limit(client)}, half of what others leave of "
                f"{self.max_bytes}: send the request again in {RETRY_AFTER_S} s",
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
        """Has the C library give back what bodies leave behind, once there were none for a while."""
        if self._trim is not None:
            self._trim.cancel()
        loop = asyncio.get_running_loop()
        self._trim = loop.call_later(TRIM_AFTER_S, loop.run_in_executor, None, give_back)


class BodyShare:
    """What one request's body takes, from its first byte until :meth:`give_back`."""

    def __init__(self, room: BodyRoom, client: str) -> None:
        self._room = room
        self._client = client
        self._num_read = 0
        self._num_taken = 0

    def take(self, num_bytes: int) -> None:
        """Raises :class:`OverloadedError` if there is no room for that many more."""
        self._num_read += num_bytes
        num_new = max(self._num_read - FREE_BYTES, 0) - self._num_taken
        if num_new:
            self._room.take(self._client, num_new)
            self._num_taken += num_new

    def give_back(self) -> None:
        """The body has become a checked request, or an error. May be called again."""
        if self._num_taken:
            self._room.give_back(self._client, self._num_taken)
            if not self._room.num_bytes:
                self._room.trim_soon()
        self._num_taken = 0

    def turn(self) -> AbstractAsyncContextManager[None]:
        """When a large body may be parsed."""
        return self._room.large_bodies.turn(self._client)

    def put_into(self, scope: Scope) -> None:
        scope.setdefault("state", {})[_IN_STATE] = self


def share_of(scope: Scope) -> BodyShare:
    """That of a request's body. Whoever needs nothing of the body any more, though the answer takes longer,
    gives it back."""
    share: BodyShare = scope["state"][_IN_STATE]
    return share
