"""Names of what files hold: a block or a state, as one write has left it. Pure.

A key says which tokens lead to a block; a name says which write has made this copy of it. Each rank writes
its share of a start under the same name. So shares with equal names come from one computation. Those in a
folder that was restored from an older copy have other names.
"""

from __future__ import annotations

import threading

NUMBER_BYTES = 8
BLOCK, STATE = b"b", b"s"
"""First bytes of names."""


def block_name(key: bytes, number: int) -> bytes:
    return BLOCK + key + number.to_bytes(NUMBER_BYTES, "big")


def state_name(key: bytes, number: int) -> bytes:
    return STATE + key + number.to_bytes(NUMBER_BYTES, "big")


class NameChanges:
    """Names that an index has got and lost, until they are taken. Any thread may call everything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._added: dict[bytes, None] = {}
        self._lost: dict[bytes, None] = {}

    def got(self, name: bytes) -> None:
        with self._lock:
            self._added[name] = None

    def lost(self, name: bytes) -> None:
        with self._lock:  # a name is never got twice
            if name in self._added:
                del self._added[name]
            else:
                self._lost[name] = None

    @property
    def is_empty(self) -> bool:
        return not self._added and not self._lost

    def take(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Returns the names that were got and those that were lost since the last call."""
        with self._lock:
            changes = tuple(self._added), tuple(self._lost)
            self._added, self._lost = {}, {}
        return changes
