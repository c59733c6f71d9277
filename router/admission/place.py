"""Places: how many of its choices a request may run at the same time, and how long places are taken."""

from __future__ import annotations

import math
import time

from router.admission.fair_queue import QueuedRequest

RESERVED = 4
"""A request of many choices leaves one of every ``RESERVED`` places to others."""


class Place:
    """The places of one request. A request with many choices may begin with only some of them; the other
    choices follow later.

    While other requests wait, the request gives places back as its choices end, until it has one place left.
    While no other request waits, it takes free places. So it uses idle servers, but does not keep other
    requests from getting places on busy servers.
    """

    def __init__(self, queued: QueuedRequest, num_places: int) -> None:
        self.queued = queued
        self.num_places = num_places
        """Choices that may run now."""
        self.num_left = queued.num_places - num_places
        """Choices that have not begun."""
        self.num_answer_tokens = 0
        """Set by the request's owner before the request leaves. Its client is charged for these tokens."""
        self.since_s = time.monotonic()
        self.queue_s = self.since_s - queued.since_s

    def grow(self, count: int) -> None:
        """Add ``count`` places, and have the request begin as many further choices."""
        self.num_places += count
        self.num_left -= count
        self.queued.begin()


def first_places(queued: QueuedRequest, *, places: int, taken: int) -> int:
    """Return how many of ``places`` a request begins with: as many as it wants if these are few, otherwise as
    many as are free beyond the places that are kept for other requests, but at least one."""
    reserved = places // RESERVED
    if queued.num_places <= max(1, reserved):
        return queued.num_places
    return min(queued.num_places, max(1, places - taken - reserved))


RECENT = 1 / 32
"""The weight of the newest request in the mean. With this weight, about the last hundred requests have an
influence."""
UNKNOWN_S = 1.0
"""The mean that is assumed before any request has ended."""
LONGEST_WAIT_S = 600.0


class Residence:
    """The mean time for which recent requests took their places. It reads no clock: callers pass the
    times."""

    def __init__(self) -> None:
        self.mean_s = UNKNOWN_S
        self._num_seen = 0

    def left(self, duration_s: float) -> None:
        """Count a request that took its places for ``duration_s``."""
        self._num_seen += 1
        self.mean_s += (duration_s - self.mean_s) * max(RECENT, 1 / self._num_seen)

    def retry_after_s(self, num_waiting: int, num_running: int) -> int:
        """Return after how many whole seconds all waiting choices will have begun: in each period of
        :attr:`mean_s` seconds, ``num_running`` places become free (Little's law). A client that comes back
        after that time finds the queue empty if no other requests have come."""
        wait_s = (num_waiting + 1) * self.mean_s / max(1, num_running)
        return math.ceil(min(max(wait_s, 1.0), LONGEST_WAIT_S))
