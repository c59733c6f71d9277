"""Decides when a child that has ended is started again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class RestartLimits:
    """A child may die ``max_restarts`` times within ``window_s`` seconds; pauses between tries double."""

    max_restarts: int = 5
    window_s: float = 120.0
    first_delay_s: float = 0.1
    max_delay_s: float = 8.0


class RestartPolicy:
    """Counts the deaths of one child and decides about restarts."""

    def __init__(self, limits: RestartLimits) -> None:
        self.limits = limits
        self._deaths: deque[float] = deque()

    def delay_s(self, now_s: float) -> float | None:
        """Records a death at ``now_s``. Returns the seconds to wait before the next start, or None to give
        up."""
        self._deaths.append(now_s)
        while self._deaths[0] <= now_s - self.limits.window_s:
            self._deaths.popleft()
        recent = len(self._deaths)
        if recent > self.limits.max_restarts:
            return None
        return min(self.limits.first_delay_s * 2.0 ** (recent - 1), self.limits.max_delay_s)
