"""Places: how many of its choices a request may run at one time, and how long places are taken for."""

from __future__ import annotations

import math
import time

from router.admission.fair_queue import QueuedRequest

RESERVED = 4
"""A request of many choices leaves one of so many places to others."""


class Place:
    """A request whose choices are more than a part of all places begins with some, and the others follow.

    While others wait it gives places back as its choices end, down to one; while nobody waits it takes what
    is free. So it uses servers that are idle, and keeps nobody from those that are busy.
    """

    def __init__(self, queued: QueuedRequest, num_places: int) -> None:
        self.queued = queued
        self.num_places = num_places
        """Choices that may run now."""
        self.num_left = queued.num_places - num_places
        """Choices that have not begun."""
        self.num_answer_tokens = 0
        """Told by the request's owner before it leaves: the key is charged for them."""
        self.since_s = time.monotonic()
        self.queue_s = self.since_s - queued.since_s

    def grow(self, count: int) -> None:
        """Room for further choices."""
        self.num_places += count
        self.num_left -= count
        self.queued.begin()


def first_places(queued: QueuedRequest, *, places: int, taken: int) -> int:
    """How many of ``places`` a request begins with: all that it wants, or what others can spare."""
    reserved = places // RESERVED
    if queued.num_places <= max(1, reserved):
        return queued.num_places
    return min(queued.num_places, max(1, places - taken - reserved))


RECENT = 1 / 32
"""Weight of the newest request in the mean: the last hundred or so count."""
UNKNOWN_S = 1.0
"""Before any request has ended."""
LONGEST_WAIT_S = 600.0


class Residence:
    """The mean time that a place is taken for, of recent requests. Pure: it is told the times."""

    def __init__(self) -> None:
        self.mean_s = UNKNOWN_S
        self._num_seen = 0

    def left(self, duration_s: float) -> None:
        """A place was taken for so long."""
        self._num_seen += 1
        self.mean_s += (duration_s - self.mean_s) * max(RECENT, 1 / self._num_seen)

    def retry_after_s(self, num_waiting: int, num_running: int) -> int:
        """When those that wait have all begun, in whole seconds: of that many places, ``num_running`` become
        free every :attr:`mean_s` (Little's law). Who comes back then finds the queue empty if nobody else
        came."""
        wait_s = (num_waiting + 1) * self.mean_s / max(1, num_running)
        return math.ceil(min(max(wait_s, 1.0), LONGEST_WAIT_S))
