"""How long writing rests, so that running answers notice little of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

WRITE_BYTES_PER_S = 20 << 20
"""A piece takes 0.5 ms of one core, beside what the system writes: 1 % of a core at this rate."""
WRITE_CORE_SHARE = 0.005
"""The part of a core that the files' thread uses for writes, at most. What running answers notice of it is
the interpreter's lock: each piece takes it about eight times, whatever its size, and the engine's thread
waits about as long as the files' thread works (docs/cache-tiers.md)."""
IDLE_CORE_SHARE = 0.05
"""If all other threads of the process use less of a core for :data:`LOOK_S`, then no answer runs."""
LOOK_S = 0.05


@dataclass(frozen=True)
class Times:
    """Seconds of the clock, of the process' CPU time and of the calling thread's, at one moment."""

    clock_s: float
    process_s: float
    thread_s: float

    @classmethod
    def now(cls) -> Times:
        return cls(time.monotonic(), time.process_time(), time.thread_time())


class WritePace:
    """Says when the next piece may be written. The files' thread alone calls it.

    The limit of bytes always holds, the limit of CPU time only while the process does other work.
    """

    def __init__(self, now: Callable[[], Times] = Times.now) -> None:
        self._now = now
        self._looked: Times | None = None
        self._until_s = self._least_until_s = 0.0

    def wrote(self, num_bytes: int, cpu_s: float) -> None:
        """Note that a piece was written just now, with so much of this thread's CPU time."""
        self._looked = self._now()
        rest_s = num_bytes / WRITE_BYTES_PER_S
        self._least_until_s = self._looked.clock_s + rest_s
        self._until_s = self._looked.clock_s + max(rest_s, cpu_s / WRITE_CORE_SHARE)

    def rest_s(self) -> float:
        """Return 0 if a piece may be written now, else the seconds after which to ask again."""
        now = self._now()
        if now.clock_s >= self._until_s:
            return 0.0
        looked = self._looked
        assert looked is not None, "a rest follows a piece"
        look_at_s = max(self._least_until_s, looked.clock_s + LOOK_S)
        if now.clock_s >= look_at_s:
            if _others_share(looked, now) < IDLE_CORE_SHARE:
                return 0.0
            self._looked = now
            look_at_s = now.clock_s + LOOK_S
        return min(self._until_s, look_at_s) - now.clock_s


def _others_share(before: Times, after: Times) -> float:
    """Return the part of a core that all threads but this one have used between two moments."""
    others_s = after.process_s - before.process_s - (after.thread_s - before.thread_s)
    return others_s / (after.clock_s - before.clock_s)
