"""How long writing rests, so that running answers notice little of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

WRITE_BYTES_PER_S = 20 << 20
"""A piece takes 0.5 ms of one core, beside what the system writes: 1 % of a core at this rate."""
WRITE_CORE_SHARE = 0.0075
"""The part of a core that the files' thread uses for writes, at most. What running answers notice of it is
the interpreter's lock: each piece takes it about eight times, whatever its size, and the engine's thread
waits about as long as the files' thread works (docs/cache-tiers.md)."""
IDLE_CORE_SHARE = 0.05
"""If all other threads of the process used less of a core since the last piece, then no answer runs."""


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
    """Says how long to rest after each piece. The files' thread alone calls it."""

    def __init__(self, now: Callable[[], Times] = Times.now) -> None:
        self._now = now
        self._began: Times | None = None
        self._ended: Times | None = None

    def begin(self) -> None:
        """Note that a piece is written from now on."""
        self._began = self._now()

    def rest_s(self, num_bytes: int) -> float:
        """Return the rest after a piece of ``num_bytes`` that has just been written.

        The limit of bytes always holds, the limit of CPU time only while the process does other work.
        """
        before, self._ended = self._ended, self._now()
        assert self._began is not None, "begin() comes first"
        rest_s = num_bytes / WRITE_BYTES_PER_S
        if before is not None and _others_share(before, self._ended) < IDLE_CORE_SHARE:
            return rest_s
        return max(rest_s, (self._ended.thread_s - self._began.thread_s) / WRITE_CORE_SHARE)


def _others_share(before: Times, after: Times) -> float:
    """Return the part of a core that all threads but this one have used between two moments."""
    others_s = after.process_s - before.process_s - (after.thread_s - before.thread_s)
    return others_s / max(1e-9, after.clock_s - before.clock_s)
