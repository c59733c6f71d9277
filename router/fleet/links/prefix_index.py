"""The prefixes in one server's cache that it has reported to this router."""

from __future__ import annotations

from router.policies.policy import Demand
from wire.messages.generation import ServerInfo
from wire.messages.prefixes import PrefixNews


class PrefixIndex:
    """A copy of the server's set of keys. Each key stands for one prefix."""

    def __init__(self) -> None:
        self.version: int | None = None
        """Version of the copy. None if there is no copy."""
        self._keys: set[bytes] = set()
        self._fingerprint = ""
        self._block_size = 1

    def __len__(self) -> int:
        return len(self._keys)

    def appeared(self, info: ServerInfo) -> None:
        """Note that a server answers: its prefixes are not known yet."""
        self._fingerprint, self._block_size = info.fingerprint, info.block_size
        self._keys, self.version = set(), None

    def forget(self) -> None:
        """Drop the copy, as no policy reads it any more."""
        self._keys, self.version = set(), None

    def update(self, news: PrefixNews) -> None:
        if news.is_whole:
            self._keys = set(news.added)
        else:
            self._keys.update(news.added)
            self._keys.difference_update(news.removed)
        self.version = news.version

    def cached_tokens(self, demand: Demand) -> int:
        """Return how many tokens of the request the server would not have to compute. The server always
        computes the last token."""
        if not self._keys:
            return 0
        keys = demand.block_keys(self._fingerprint, self._block_size)
        for index in range(len(keys) - 1, -1, -1):
            if keys[index] in self._keys:
                return (index + 1) * self._block_size
        return 0
