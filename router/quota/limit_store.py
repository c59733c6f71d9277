"""What a store of limits does. Several processes may use one store; each call is atomic there.

A request's life has two calls. :meth:`LimitStore.admit` reserves the tokens that it may use;
:meth:`LimitStore.settle` puts in their place what it has used. A reservation that its process never settles
lapses at its deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.access.key_limits import KeyLimits

KEPT_S = 24 * 3600.0
"""How long a store remembers a lapsed reservation, which may still be settled, and the id of a charge, which
may be sent again."""


class LimitStoreError(Exception):
    """The store can't be used now. Whether it has done what was asked is unknown."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request that asks to be let in."""

    id: str
    """Unique among all requests of all routers."""
    name: str
    """The name of the key."""
    limits: KeyLimits
    num_tokens: int
    """How many tokens to reserve; 0 if the key has no limit of tokens."""
    lasts_s: float
    """How long the request can take. Then its reservation lapses."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a key has used, after a request was let in or refused."""

    now_s: float
    """The store's clock, in seconds since 1970."""
    requests_spent: float = 0.0
    """The requests of the last minute, as far as time has not given them back."""
    tokens_spent: float = 0.0
    """The same for tokens, running requests' reservations included."""
    day: int = 0
    """Number of the day since 1970, UTC."""
    used_today: int = 0
    month: int = 0
    """Number of the month since the year 0, UTC."""
    used_this_month: int = 0
    used_total: int = 0
    reserved: int = 0
    """Tokens that running requests have reserved."""


@dataclass(frozen=True, slots=True)
class Verdict:
    standing: Standing
    refused_by: str | None = None
    """The name of the limit that refuses the request; None: it is let in."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """What one or several requests of a key have used."""

    id: str
    name: str
    num_tokens: int
    day: int
    """The day and the month on whose account the tokens go: those in which the request was let in."""
    month: int
    was_reserved: bool = True
    """Whether there is a reservation with this id. Without one, the tokens are added once for each id."""


class LimitStore(Protocol):
    """Counts what keys use. Every method but :meth:`close` may raise :class:`LimitStoreError`, and may be
    cancelled."""

    async def admit(self, ask: Ask) -> Verdict:
        """Let a request in and reserve its tokens, or refuse it and change nothing."""

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Book what requests have used. The same settlement may be sent again: it counts once."""

    async def check(self) -> None:
        """Return if the store can be used."""

    async def close(self) -> None:
        """Close the connection to the store."""
