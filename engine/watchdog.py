"""Notices that the engine's thread does not come back: its GPU hangs, or answers no call any more.

A kernel that hangs raises nothing. The thread that launched it waits for its results, and an exception can't
reach a thread that waits inside CUDA. So another thread counts time. Torch and Triton release the
interpreter's lock while they wait, so that thread runs.

It counts its own ticks, not a clock: a process that was frozen (SIGSTOP, a suspended machine) has not waited
while it was frozen, and one that gets no core waits longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

MAX_TICK_S = 1.0


class Watch(Protocol):
    """Watches the engine's thread, from start to stop."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


class NoWatch:
    """The watch of an engine whose steps may take any time."""

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass


class Watchdog:
    """Calls ``on_hang`` once, on its own thread, if the same turn lasts for ``deadline_s``.

    ``turn`` returns when the step or event that the engine's thread runs began, which tells it from all
    others; None while the thread waits for an event.
    """

    def __init__(
        self, deadline_s: float, turn: Callable[[], float | None], on_hang: Callable[[], None]
    ) -> None:
        self._deadline_s = deadline_s
        self._tick_s = min(MAX_TICK_S, deadline_s / 4)
        self._turn = turn
        self._on_hang = on_hang
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        seen: float | None = None
        waited_s = 0.0
        while not self._is_over.wait(self._tick_s):
            turn = self._turn()
            waited_s = waited_s + self._tick_s if turn is not None and turn == seen else 0.0
            seen = turn
            if waited_s >= self._deadline_s:
                self._on_hang()
                return
