"""How many slow lanes compute at one time, which is next, and when they make a pause.

The lowest priority does not keep them from others' processors: Linux leaves a thread of more weight waiting
behind a busy one though another processor runs nothing but such lanes. So few of them run at one time, and
where several want to, nine tenths of the time none does. The one that has used least is next: an answer
whose masks take ten milliseconds goes on beside others whose masks take half a second.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

CORES_PER_TURN = 2
PAUSE = 9.0
"""Behind a turn, times its length, if somebody waits for the next one."""


class Used:
    """What turns a lane has had."""

    seconds = 0.0


class LaneTurns:
    """Shared by the threads of lanes."""

    def __init__(self, num_turns: int | None = None, *, pause: float = PAUSE) -> None:
        """``num_turns`` at one time; None: as there are cores."""
        self._num_free = num_turns or max(1, (os.cpu_count() or 1) // CORES_PER_TURN)
        self._pause = pause
        self._waiting: list[tuple[float, int]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._has_closed = False

    @contextmanager
    def turn(self, used: Used) -> Iterator[None]:
        """Waits for the caller's turn, which is as long as the block; ``used`` grows by its length."""
        mine = used.seconds, next(self._numbers)
        with self._changed:
            heapq.heappush(self._waiting, mine)
            self._changed.wait_for(lambda: self._num_free and self._waiting[0] == mine)
            heapq.heappop(self._waiting)
            self._num_free -= 1
        began_s = time.monotonic()
        try:
            yield
        finally:
            took_s = time.monotonic() - began_s
            used.seconds += took_s
            with self._changed:
                if self._waiting:
                    self._changed.wait_for(lambda: self._has_closed, self._pause * took_s)
                self._num_free += 1
                self._changed.notify_all()

    def close(self) -> None:
        """Nobody makes a pause any more."""
        with self._changed:
            self._has_closed = True
            self._changed.notify_all()
