"""How long requests take, and what that says about a wait."""

from __future__ import annotations

import math

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
