"""A thread's CPU time by named phases, each without the phases called within it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any


class PhaseClock:
    """Nanoseconds of one thread's CPU time by phase. A timed call costs one microsecond more."""

    def __init__(self, outermost: str) -> None:
        self._outermost = outermost
        self._open: list[str] = []
        self._since_ns: int | None = None
        self._wrapped: list[tuple[Any, str, Any]] = []
        self.spent_ns: Counter[str] = Counter()

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        """Counts every call of a method of ``owner``, an object or a class, as ``phase``."""
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._open.append(phase)
            try:
                return method(*args, **kwargs)
            finally:
                self._turn()
                self._open.pop()

        self._wrapped.append((owner, name, method))
        setattr(owner, name, timed)

    def unwrap(self) -> None:
        """Restores all methods."""
        for owner, name, method in self._wrapped:
            setattr(owner, name, method)
        self._wrapped.clear()

    def _turn(self) -> None:
        """Records the time of the phase that ends here or is interrupted."""
        now = time.thread_time_ns()
        if self._since_ns is not None:
            self.spent_ns[self._open[-1] if self._open else self._outermost] += now - self._since_ns
        self._since_ns = now
