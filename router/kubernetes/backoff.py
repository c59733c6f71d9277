"""How long to wait before the Kubernetes API is asked again. Pure."""

from __future__ import annotations

import random

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
"""Routers serve on meanwhile with the servers that they know, so a quick return is worth little, and an API
server that comes up again has enough to do."""
JITTER = 0.25
"""Of the pause, either way, so that many routers do not all ask at one moment."""
LASTED_S = 10.0
"""What lasted so long was no failure from the start: the next pause is the first one again."""


class Backoff:
    """Doubles the pause with each failure in a row."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._num_failures = 0

    def pause_s(self, lasted_s: float) -> float:
        """``lasted_s``: from when it was asked to the failure."""
        if lasted_s >= LASTED_S:
            self._num_failures = 0
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0**self._num_failures)
        self._num_failures = min(self._num_failures + 1, 32)
        return pause_s * self._rng.uniform(1 - JITTER, 1 + JITTER)
