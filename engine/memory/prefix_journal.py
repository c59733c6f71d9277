"""The cached prefixes that a server can serve, and their changes since a router last asked."""

from __future__ import annotations

import random
from collections import deque

from wire.messages.prefixes import PrefixNews

MAX_CHANGES = 4096
"""Number of changes that are kept. A router that has missed more receives the whole set, up to
:data:`MAX_KEYS`."""
MAX_KEYS = 65_536
"""Maximum number of keys sent at a time (1 MiB). If there are more, those added last are sent."""


class PrefixJournal:
    """A set of keys of cached prefixes (:mod:`wire.messages.prefixes`). The set has a version.

    Versions start at a random number, so that they differ from those of another process.
    """

    def __init__(self) -> None:
        self._version = random.getrandbits(62)
        self._keys: dict[bytes, None] = {}
        self._changes: deque[bytes] = deque(maxlen=MAX_CHANGES)
        """Keys that were added or removed, in order. Each change made a new version."""

    @property
    def version(self) -> int:
        """Increases with every change."""
        return self._version

    def add(self, key: bytes) -> None:
        self._keys[key] = None
        self._changed(key)

    def remove(self, key: bytes) -> None:
        del self._keys[key]
        self._changed(key)

    def _changed(self, key: bytes) -> None:
        self._version += 1
        self._changes.append(key)

    def news(self, since: int | None) -> PrefixNews:
        """Return what has changed for a router that has version ``since`` (None: it has no version)."""
        num_missed = MAX_CHANGES + 1 if since is None else self._version - since
        if not 0 <= num_missed <= len(self._changes):
            return PrefixNews(self._version, True, tuple(self._keys)[-MAX_KEYS:])
        changed = dict.fromkeys(list(self._changes)[len(self._changes) - num_missed :])
        return PrefixNews(
            self._version,
            False,
            added=tuple(key for key in changed if key in self._keys),
            removed=tuple(key for key in changed if key not in self._keys),
        )
