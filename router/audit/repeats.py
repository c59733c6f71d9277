"""Lets the first of many equal events through, and counts the others.

A client that sends wrong keys all day must not fill the disk. So there is a line for the first event of a
kind, and one with the number of further ones when a while has passed. The while grows as long as such events
go on, and of many kinds at once only some have lines of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

FIRST_WINDOW_S = 60.0
LONGEST_WINDOW_S = 3600.0


@dataclass
class _Kind:
    record: dict[str, Any]
    num_more: int = 0


class Repeats:
    """Events of one sort. ``now`` is a clock in seconds."""

    def __init__(self, max_kinds: int, others: dict[str, Any], now: Callable[[], float]) -> None:
        """``others``: what is noted of the events beyond ``max_kinds``."""
        self._max_kinds, self._others, self._now = max_kinds, others, now
        self._kinds: dict[Hashable, _Kind] = {}
        self._num_others = 0
        self._window_s = FIRST_WINDOW_S
        self.ends_s = float("inf")
        """When the counts are due."""

    def note(self, kind: Hashable, record: dict[str, Any]) -> bool:
        """Return whether ``record`` is the first of its kind, and needs a line. Otherwise it is counted."""
        if not self._kinds:
            self.ends_s = self._now() + self._window_s
        known = self._kinds.get(kind)
        if known is not None:
            known.num_more += 1
        elif len(self._kinds) < self._max_kinds:
            self._kinds[kind] = _Kind(record)
            return True
        else:
            self._num_others += 1
        return False

    def counts(self) -> list[dict[str, Any]]:
        """Return a record for each kind that came again, and begin to count anew."""
        told = [one.record | {"repeated": one.num_more} for one in self._kinds.values() if one.num_more]
        if self._num_others:
            told.append(self._others | {"repeated": self._num_others})
        self._window_s = min(2 * self._window_s, LONGEST_WINDOW_S) if told else FIRST_WINDOW_S
        self._kinds.clear()
        self._num_others, self.ends_s = 0, float("inf")
        return told
