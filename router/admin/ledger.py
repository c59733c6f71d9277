"""What operators have changed, so that several router processes end in the same state.

The ledger has one entry for each server and each setting that was changed: the newest one. The stamp says
which of two entries is newer. So the order in which entries arrive does not matter, and an entry that arrives
twice changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel

PROCESSES = 64
"""Maximum number of router processes: the last digits of a stamp tell them apart."""


class Entry(BaseModel, frozen=True):
    """One server's or one setting's newest change."""

    table: str
    """``workers`` or ``settings``, as in the state file."""
    key: tuple[str, ...]
    """Role and address of a server, or the name of a setting."""
    values: tuple[Any, ...]
    """State of a server and who added it, or the value of a setting."""
    stamp: int
    """Higher for newer changes, and different for each change. 0: saved by a release without stamps."""

    @property
    def place(self) -> tuple[str, ...]:
        return (self.table, *self.key)


class Ledger:
    """The newest entries. ``clock`` gives nanoseconds since 1970: one clock for all processes of a host."""

    def __init__(self, process: int = 0, clock: Callable[[], int] = time.time_ns) -> None:
        self._process = process
        self._clock = clock
        self._entries: dict[tuple[str, ...], Entry] = {}
        self._newest = 0

    def stamp(self) -> int:
        """Return a stamp for a new change. It is above all stamps in the ledger, even if the clock was set
        back."""
        now = self._clock() // 1000 * PROCESSES + self._process
        if now <= self._newest:
            now = (self._newest // PROCESSES + 1) * PROCESSES + self._process
        self._newest = now
        return now

    def take(self, entries: Iterable[Entry]) -> list[Entry]:
        """Keep the entries that are newer than those in the ledger, and return them."""
        newer = []
        for entry in entries:
            known = self._entries.get(entry.place)
            if known is None or entry.stamp > known.stamp:
                self._entries[entry.place] = entry
                newer.append(entry)
        self._newest = max([self._newest, *(entry.stamp for entry in newer)])
        return newer

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def newer_than(self, stamps: dict[str, int]) -> list[Entry]:
        """Return the entries that a ledger with these :attr:`stamps` lacks or has in an older form."""
        return [one for one in self._entries.values() if one.stamp > stamps.get(_name(one), -1)]

    @property
    def stamps(self) -> dict[str, int]:
        """Return the stamp of each entry, by the entry's name."""
        return {_name(one): one.stamp for one in self._entries.values()}


def _name(entry: Entry) -> str:
    return " ".join(entry.place)
