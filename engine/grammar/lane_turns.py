"""Decides how many slow lanes compute at one time, which lane is next, and when lanes pause.

Giving slow lanes the lowest priority does not keep them off processors that other threads need. Linux lets a
thread of higher priority wait on a busy processor even if another processor runs nothing but slow lanes. So
only a few slow lanes run at one time, and if several lanes want to run, all of them pause for nine tenths of
the time. The client that has used the least time is next, on all its lanes together. So an answer whose masks
take ten milliseconds is not held up by another client's answers whose masks take half a second, however many
they are.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

CORES_PER_TURN = 2
PAUSE = 9.0
"""Length of the pause after a turn, as a multiple of the turn's length. There is a pause only if another lane
waits for the next turn."""


class Used:
    """What one client has used of the lanes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Length of all turns on the client's slow lanes together."""
        self.last_opening = 0
        """The number of the client's last grammar that a lane began; 0: none was begun."""


class _Waiting(NamedTuple):
    used: Used
    number: int


class LaneTurns:
    """Turns that are shared by the threads of all slow lanes."""

    def __init__(self, num_turns: int | None = None, *, pause: float = PAUSE) -> None:
        """``num_turns``: turns at the same time; None: one for every :data:`CORES_PER_TURN` cores."""
        self._num_free = num_turns or max(1, (os.cpu_count() or 1) // CORES_PER_TURN)
        self._pause = pause
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._has_closed = False

    @contextmanager
    def turn(self, used: Used) -> Iterator[None]:
        """Waits for the caller's turn, which lasts as long as the ``with`` block. The turn's length is added
        to ``used``."""
        mine = _Waiting(used, next(self._numbers))
        with self._changed:
            self._waiting.append(mine)
            self._changed.wait_for(lambda: self._num_free and self._next() is mine)
            self._waiting.remove(mine)
            self._num_free -= 1
            self._changed.notify_all()  # a further turn may be free
        began_s = time.monotonic()
        try:
            yield
        finally:
            took_s = time.monotonic() - began_s
            with self._changed:
                used.seconds += took_s
                if self._waiting:
                    self._changed.wait_for(lambda: self._has_closed, self._pause * took_s)
                self._num_free += 1
                self._changed.notify_all()

    def _next(self) -> _Waiting:
        return min(self._waiting, key=lambda one: (one.used.seconds, one.number))

    def close(self) -> None:
        """Ends all pauses, now and from now on."""
        with self._changed:
            self._has_closed = True
            self._changed.notify_all()
