"""When requests may be sent to an endpoint that is away, and when to stop waiting for it."""

from __future__ import annotations

import random
from collections.abc import Callable

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0


def pause_s(num_failures: int, retry_after_s: float | None = None) -> float:
    """Returns how long to wait after ``num_failures`` failures in a row: what the endpoint asks for, else
    0.5 s, 1 s, 2 s, … 30 s. A random part keeps many lines from coming back at the same moment."""
    base_s = retry_after_s
    if base_s is None:
        base_s = min(FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, 10), MAX_PAUSE_S)
    return base_s + random.uniform(0.0, 0.25) * max(base_s, FIRST_PAUSE_S)


class Pace:
    """The state of the endpoint, as its answers show it. ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float], give_up_after_s: float) -> None:
        self._clock = clock
        self._give_up_after_s = give_up_after_s
        self._open_at_s = clock()
        self._trouble_since_s: float | None = None
        self._num_pauses = 0
        self.num_answered = 0
        """Lines that were answered so far."""

    def answered(self) -> None:
        """Notes that a line has got its answer: the endpoint is there."""
        self.num_answered += 1
        self._num_pauses = 0
        self._open_at_s = self._clock()
        self._trouble_since_s = None

    def refused(self) -> None:
        """Notes that a line was not taken."""
        if self._trouble_since_s is None:
            self._trouble_since_s = self._clock()

    def away(self, retry_after_s: float | None) -> None:
        """Notes that the endpoint is away. Lines that were sent together are one failure, not many."""
        self.refused()
        if self._clock() >= self._open_at_s:
            self._num_pauses += 1
            self._open_at_s = self._clock() + pause_s(self._num_pauses, retry_after_s)

    @property
    def wait_s(self) -> float:
        """Seconds until something may be sent again."""
        return max(0.0, self._open_at_s - self._clock())

    @property
    def is_given_up(self) -> bool:
        """Whether lines were refused for too long, and none was answered meanwhile."""
        since_s = self._trouble_since_s
        return since_s is not None and self._clock() - since_s > self._give_up_after_s
