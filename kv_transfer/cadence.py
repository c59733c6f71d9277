"""How often to poll: fast while news is likely, slower the longer nothing happens."""

from __future__ import annotations

FAST_S = 50e-6
FAST_FOR_S = 5e-3
SLOW_S = 1e-3
"""Measured between two processes: at 1 ms a read whose target takes part (TCP, shared memory without
CMA) pays at most 1 ms more and keeps its bandwidth; a poll costs 6 to 40 µs."""


def poll_delay(quiet_s: float) -> float:
    """Seconds until the next poll, ``quiet_s`` after the last thing that happened."""
    return FAST_S if quiet_s < FAST_FOR_S else SLOW_S
