"""The prefixes that one server has reported to this router: on its device, and in slower tiers."""

from __future__ import annotations

from router.policies.policy import Demand
from wire.messages.generation import ServerInfo
from wire.messages.prefixes import PrefixNews

HOST = "host"
"""The tier of starts in host memory."""


class PrefixIndex:
    """A copy of the server's set of keys. Each key stands for one prefix."""

    def __init__(self) -> None:
        self.version: int | None = None
        """Version of the copy. None if there is no copy."""
        self._keys: dict[bytes, str] = {}
        """The fastest tier that has each key; empty: the device."""
        self._costs: dict[str, tuple[float, float]] = {}
        """What the server says that reading a start costs, for each slower tier
        (:class:`wire.messages.prefixes.TierNews`)."""
        self._fingerprint = ""
        self._block_size = 1

    def __len__(self) -> int:
        return len(self._keys)

    def appeared(self, info: ServerInfo) -> None:
        """Note that a server answers: its prefixes are not known yet."""
        self._fingerprint, self._block_size = info.fingerprint, info.block_size
        self.forget()

    def forget(self) -> None:
        """Drop the copy: no policy reads it any more, or it may be another server's."""
        self._keys, self._costs, self.version = {}, {}, None

    def update(self, news: PrefixNews) -> None:
        if news.is_whole:
            self._keys = {}
        for key in news.removed:
            self._keys.pop(key, None)
        self._keys |= dict.fromkeys(news.added, "")
        for told in news.tiers:
            self._keys |= dict.fromkeys(told.added, told.tier)
            self._costs[told.tier] = told.start_cost, told.token_cost
        self.version = news.version

    def cached_tokens(self, demand: Demand) -> int:
        """Return how many tokens of the request the server would not have to compute, less those that it
        could compute while it reads the others from a slower tier. The server always computes the last token.
        """
        if not self._keys:
            return 0
        on_device, in_tiers = self._longest(demand)
        best = float(on_device)
        for tier, length in in_tiers.items():
            start_cost, token_cost = self._costs[tier]
            best = max(best, length - max(0.0, start_cost + token_cost * (length - on_device)))
        return int(best)

    @property
    def is_shared(self) -> bool:
        """Whether the server has host memory, so that it can read starts of others, and others its starts."""
        return HOST in self._costs

    def longest_start(self, demand: Demand) -> int:
        """Return the length of the longest start that another server could read, in any tier."""
        keys = demand.block_keys(self._fingerprint, self._block_size) if self._keys else []
        # The other server leaves one more token to compute behind it.
        most = min(len(keys), (len(demand.token_ids) - 2) // self._block_size)
        return self._block_size * next((n for n in range(most, 0, -1) if keys[n - 1] in self._keys), 0)

    def _longest(self, demand: Demand) -> tuple[int, dict[str, int]]:
        """Return the length of the longest start on the device, and of the longest one in each slower tier
        that is longer than that."""
        keys = demand.block_keys(self._fingerprint, self._block_size)
        in_tiers: dict[str, int] = {}
        for num_blocks in range(len(keys), 0, -1):
            tier, length = self._keys.get(keys[num_blocks - 1]), num_blocks * self._block_size
            if tier == "":
                return length, in_tiers
            # A server leaves one more token to compute behind a start that it reads from a slower tier.
            if tier is not None and length < len(demand.token_ids) - 1:
                in_tiers.setdefault(tier, length)
        return 0, in_tiers
