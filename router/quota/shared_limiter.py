"""Admits requests by a store that other processes use, too, and goes on without it while it is down.

A store that fails or answers too late is left alone until it answers again. Meanwhile this process applies
the limits by itself: its accounts begin where the store's were last seen, and what it uses is booked in the
store afterwards. So requests are still served while a store is down, and each process lets in as much as a
single process might.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from contextlib import suppress

from router.quota.limit_store import Ask, LimitStore, LimitStoreError, Settlement, Standing, Verdict
from router.quota.limiter import Admission, admit_to, settle_nothing, settlement_of
from router.quota.memory_store import MemoryStore
from router.quota.metrics import StoreMetrics

log = logging.getLogger(__name__)

DEADLINE_S = 1.0
"""The longest wait for a call of the store. A request waits for one call."""
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
"""The pause before the first and between later attempts to reach a store that is down."""
BATCH = 256
"""How many settlements one call books at most."""
CLOSE_S = 2.0
"""How long a process that ends tries to book what is left."""


class SharedLimiter:
    """A :class:`Limiter`."""

    def __init__(self, store: LimitStore, metrics: StoreMetrics) -> None:
        self._store = store
        self._metrics = metrics
        self._is_up = True
        metrics.up.set(1)
        self._down_since_s = 0.0
        self._seen: dict[str, Standing] = {}
        """What the store has last said of each key."""
        self._local = MemoryStore()
        """The accounts while the store is down."""
        self._pending: deque[Settlement] = deque()
        """At most one for each request in flight, and one for each entry of ``_charges`` at a time."""
        self._charges: dict[tuple[str, int, int], int] = {}
        """Tokens that the store does not know of, by key, day and month."""
        self._has_work = asyncio.Event()

    async def admit(self, ask: Ask) -> Admission:
        if not self._is_up:
            return self._admit_alone(ask)
        started = time.monotonic()
        try:
            async with asyncio.timeout(DEADLINE_S):
                verdict = await self._store.admit(ask)
        except (LimitStoreError, TimeoutError) as error:
            self._undo(ask)
            self._went_down(error)
            return self._admit_alone(ask)
        except asyncio.CancelledError:
            self._undo(ask)
            raise
        self._metrics.seconds.observe(time.monotonic() - started)
        self._seen[ask.name] = verdict.standing
        if verdict.refused_by is not None or not ask.num_tokens:
            return Admission(verdict, settle_nothing)
        return Admission(verdict, lambda num_tokens: self._settle(settlement_of(ask, verdict, num_tokens)))

    async def run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            await self._has_work.wait()
            try:
                if not self._is_up:
                    async with asyncio.timeout(DEADLINE_S):
                        await self._store.check()
                await self._book()
            except (LimitStoreError, TimeoutError) as error:
                self._went_down(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            else:
                pause_s = FIRST_PAUSE_S
                self._came_back()

    async def close(self) -> None:
        with suppress(LimitStoreError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._book()
        if self._pending or self._charges:
            log.warning("the limits' store could not be told what the last requests have used")
        with suppress(LimitStoreError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._store.close()

    def _admit_alone(self, ask: Ask) -> Admission:
        admission = admit_to(self._local, ask)
        if admission.settle is settle_nothing:
            return admission

        def settle(num_tokens: int) -> None:
            admission.settle(num_tokens)
            self._charge(ask, admission.verdict, num_tokens)

        return Admission(admission.verdict, settle)

    def _charge(self, ask: Ask, verdict: Verdict, num_tokens: int) -> None:
        key = (ask.name, verdict.standing.day, verdict.standing.month)
        self._charges[key] = self._charges.get(key, 0) + num_tokens
        self._has_work.set()

    def _settle(self, settlement: Settlement) -> None:
        self._pending.append(settlement)
        self._has_work.set()

    def _undo(self, ask: Ask) -> None:
        """End the reservation of a call whose outcome is unknown, if the store has made it."""
        if ask.num_tokens:
            self._settle(Settlement(ask.id, ask.name, 0, 0, 0))

    async def _book(self) -> None:
        """Send all that is pending. What may have been sent before is sent again, under the same ids."""
        while self._pending or self._charges:
            while self._charges and len(self._pending) < BATCH:
                (name, day, month), num_tokens = self._charges.popitem()
                charge = Settlement(secrets.token_hex(16), name, num_tokens, day, month, was_reserved=False)
                self._pending.appendleft(charge)
            batch = [self._pending[i] for i in range(min(BATCH, len(self._pending)))]
            async with asyncio.timeout(DEADLINE_S):
                await self._store.settle(batch)
            for _ in batch:
                self._pending.popleft()

    def _went_down(self, error: Exception) -> None:
        if not self._is_up:
            return
        self._is_up, self._down_since_s = False, time.monotonic()
        self._metrics.up.set(0)
        self._metrics.failures.inc()
        self._local = MemoryStore()
        for name, standing in self._seen.items():
            self._local.follow(name, standing)
        said = str(error) or f"no answer within {DEADLINE_S:g} s"
        log.error("the limits' store is down: %s; this process applies the limits of keys by itself", said)
        self._has_work.set()

    def _came_back(self) -> None:
        if not (self._pending or self._charges):
            self._has_work.clear()
        if not self._is_up:
            self._is_up = True
            self._metrics.up.set(1)
            down_s = time.monotonic() - self._down_since_s
            log.info("the limits' store is back after %.1f s", down_s)
