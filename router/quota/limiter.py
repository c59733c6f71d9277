"""What admits the requests of keys with limits. One process has one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from router.quota.limit_store import Ask, Settlement, Verdict
from router.quota.memory_store import MemoryStore

Settle = Callable[[int], None]
"""Books what a request has used. To be called once."""


@dataclass(frozen=True)
class Admission:
    verdict: Verdict
    settle: Settle
    """Never waits."""


class Limiter(Protocol):
    async def admit(self, ask: Ask) -> Admission:
        """Let a request in, or refuse it. Returns within the deadline of a store's call, whatever state the
        store is in."""

    async def run(self) -> None:
        """Keep the store up to date, until this task is cancelled."""

    async def close(self) -> None:
        """Book what is left to book, and close the store."""


class OwnLimiter:
    """A :class:`Limiter` with the accounts of this process alone."""

    def __init__(self) -> None:
        self._store = MemoryStore()

    async def admit(self, ask: Ask) -> Admission:
        return admit_to(self._store, ask)

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Do nothing: what was counted ends with the process."""


def settlement_of(ask: Ask, verdict: Verdict, num_tokens: int) -> Settlement:
    return Settlement(ask.id, ask.name, num_tokens, verdict.standing.day, verdict.standing.month)


def settle_nothing(num_tokens: int) -> None:
    """Settle a request that has reserved nothing."""


def admit_to(store: MemoryStore, ask: Ask) -> Admission:
    """Let a request in by the accounts of this process alone."""
    verdict = store.admit_now(ask)
    if verdict.refused_by is not None or not ask.num_tokens:
        return Admission(verdict, settle_nothing)
    return Admission(verdict, lambda num_tokens: store.settle_now(settlement_of(ask, verdict, num_tokens)))
