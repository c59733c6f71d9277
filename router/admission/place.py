"""What a request holds that was let in: room for so many of its choices at one time."""

from __future__ import annotations

import time
from collections.abc import Callable

from router.admission.fair_queue import Turn

RESERVED = 4
"""A request of many choices leaves one of so many places to others."""


class Place:
    """A request whose choices are more than a part of all places begins with some, and the others follow.

    While others wait it gives places back as its choices end, down to one; while nobody waits it takes what
    is free. So it uses servers that are idle, and keeps nobody from those that are busy.
    """

    def __init__(self, turn: Turn, num_places: int) -> None:
        self.turn = turn
        self.num_places = num_places
        """Choices that may run now."""
        self.num_left = turn.num_places - num_places
        """Choices that have not begun."""
        self.num_answer_tokens = 0
        """Told by the request's owner before it leaves: the key is charged for them."""
        self.since_s = time.monotonic()
        self.queue_s = self.since_s - turn.since_s
        self.begin: Callable[[int], None] = lambda count: None
        """Begins with so many further choices; set by the request's owner."""

    def grow(self, count: int) -> None:
        """Room for further choices."""
        self.num_places += count
        self.num_left -= count
        self.begin(count)


def first_places(turn: Turn, *, places: int, taken: int) -> int:
    """How many of ``places`` a request begins with: all that it wants, or what others can spare."""
    reserved = places // RESERVED
    if turn.num_places <= max(1, reserved):
        return turn.num_places
    return min(turn.num_places, max(1, places - taken - reserved))
