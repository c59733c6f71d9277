"""Decides how many slow lanes compute at one time, which lane is next, and when lanes pause.

Giving slow lanes the lowest priority does not keep them off processors that other threads need. Linux lets a
thread of higher priority wait on a busy processor even if another processor runs nothing but slow lanes. So
only a few slow lanes run at one time, and if several lanes want to run, all of them pause for nine tenths of
the time. The lane that has used the least time is next. So an answer whose masks take ten milliseconds is not
held up by answers whose masks take half a second.
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
"""Length of the pause after a turn, as a multiple of the turn's length. There is a pause only if another lane
waits for the next turn."""


class Used:
    """Length of all turns of one lane together."""

    seconds = 0.0


class LaneTurns:
    """Turns that are shared by the threads of all slow lanes."""

    def __init__(self, num_turns: int | None = None, *, pause: float = PAUSE) -> None:
        """``num_turns``: turns at the same time; None: one for every :data:`CORES_PER_TURN` cores."""
        self._num_free = num_turns or max(1, (os.cpu_count() or 1) // CORES_PER_TURN)
        self._pause = pause
        self._waiting: list[tuple[float, int]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._has_closed = False

    @contextmanager
    def turn(self, used: Used) -> Iterator[None]:
        """Waits for the caller's turn, which lasts as long as the ``with`` block. The turn's length is added
        to ``used``."""
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
        """Ends all pauses, now and from now on."""
        with self._changed:
            self._has_closed = True
            self._changed.notify_all()
