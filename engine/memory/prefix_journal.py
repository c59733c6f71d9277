"""The cached prefixes that a server can serve, where they lie, and what changed since a router last asked."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

from wire.messages.prefixes import PrefixNews, TierNews

MAX_CHANGES = 4096
"""Number of changes that are kept. A router that has missed more receives the whole set, up to
:data:`MAX_KEYS`."""
MAX_KEYS = 65_536
"""Maximum number of keys sent at a time (1 MiB). If there are more, those of the fastest tier are sent, and
of one tier those added last."""
COST_CHANGE = 1.25
"""Routers hear of another cost of reading when it differs by more than this factor."""


class Tier(IntEnum):
    """Where a start lies, fastest first."""

    DEVICE = 0
    HOST = 1
    FILES = 2


@dataclass(frozen=True)
class ReadCost:
    """The number of tokens that the device computes while it reads a start back from a slower tier."""

    start: float
    token: float
    """For each token whose KV the device lacks, besides ``start``."""

    def differs(self, other: ReadCost) -> bool:
        """Whether routers should hear of this cost if they know the other one."""
        pairs = ((self.start, other.start), (self.token, other.token))
        return any(max(pair) > COST_CHANGE * min(pair) for pair in pairs)


class PrefixJournal:
    """A set of keys of cached prefixes (:mod:`wire.messages.prefixes`). The set has a version.

    Each key is told with the fastest tier that has it. Versions start at a random number, so that they differ
    from those of another process.
    """

    def __init__(self, costs: Mapping[Tier, ReadCost] | None = None) -> None:
        """``costs``: for each slower tier that the server has and whose cost is known in advance."""
        self._costs = dict(costs or {})
        self._version = random.getrandbits(62)
        self._keys: dict[Tier, dict[bytes, None]] = {tier: {} for tier in Tier}
        self._changes: deque[bytes | None] = deque(maxlen=MAX_CHANGES)
        """Keys whose fastest tier changed, in order; None: a tier's cost. Each change made a new version."""

    @property
    def version(self) -> int:
        """Increases with every change."""
        return self._version

    def num_keys(self, tier: Tier) -> int:
        """Returns the number of starts in a tier, whatever other tiers have."""
        return len(self._keys[tier])

    def price(self, tier: Tier, cost: ReadCost) -> None:
        """Notes what reading a start from a tier costs now."""
        known = self._costs.get(tier)
        if known is None or cost.differs(known):
            self._costs[tier] = cost
            self._version += 1
            self._changes.append(None)

    def add(self, key: bytes, tier: Tier = Tier.DEVICE) -> None:
        before = self._tier_of(key)
        self._keys[tier][key] = None
        self._changed(key, before)

    def remove(self, key: bytes, tier: Tier = Tier.DEVICE) -> None:
        before = self._tier_of(key)
        del self._keys[tier][key]
        self._changed(key, before)

    def _changed(self, key: bytes, before: Tier | None) -> None:
        if self._tier_of(key) != before:
            self._version += 1
            self._changes.append(key)

    def _tier_of(self, key: bytes) -> Tier | None:
        """Returns the fastest tier that has a key; None if no tier has it."""
        return next((tier for tier, keys in self._keys.items() if key in keys), None)

    def news(self, since: int | None) -> PrefixNews:
        """Return what has changed for a router that has version ``since`` (None: it has no version)."""
        num_missed = MAX_CHANGES + 1 if since is None else self._version - since
        if not 0 <= num_missed <= len(self._changes):
            return self._news(self._newest(), is_whole=True)
        changed = dict.fromkeys(list(self._changes)[len(self._changes) - num_missed :])
        tiers = {key: self._tier_of(key) for key in changed if key is not None}
        return self._news(tiers, is_whole=False)

    def _newest(self) -> dict[bytes, Tier | None]:
        """Return at most :data:`MAX_KEYS` keys and their tiers."""
        newest: dict[bytes, Tier | None] = {}
        for tier, keys in self._keys.items():
            slower = (key for key in reversed(keys) if key not in newest)
            told = list(islice(slower, MAX_KEYS - len(newest)))  # the rest, which may be long, is left alone
            newest |= dict.fromkeys(reversed(told), tier)
        return newest

    def _news(self, tiers: Mapping[bytes, Tier | None], *, is_whole: bool) -> PrefixNews:
        return PrefixNews(
            self._version,
            is_whole,
            added=_in(tiers, Tier.DEVICE),
            removed=() if is_whole else tuple(key for key, one in tiers.items() if one != Tier.DEVICE),
            tiers=tuple(
                TierNews(tier.name.lower(), _in(tiers, tier), cost.start, cost.token)
                for tier, cost in self._costs.items()
            ),
        )


def _in(tiers: Mapping[bytes, Tier | None], tier: Tier) -> tuple[bytes, ...]:
    return tuple(key for key, one in tiers.items() if one == tier)
