"""Accounts in the memory of one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from router.quota.account import Account
from router.quota.limit_store import Ask, Settlement, Standing, Verdict


class MemoryStore:
    """A :class:`LimitStore` whose calls never wait. Reservations need not lapse: they end with the
    process."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._accounts: dict[str, Account] = {}
        self._reserved: dict[str, int] = {}

    def admit_now(self, ask: Ask) -> Verdict:
        now_s = self._now()
        account = self._account(ask.name)
        refused_by = account.admit(ask.limits, ask.num_tokens, now_s)
        if refused_by is None and ask.num_tokens:
            self._reserved[ask.id] = ask.num_tokens
        return Verdict(account.standing(now_s), refused_by)

    def settle_now(self, settlement: Settlement) -> None:
        num_reserved = self._reserved.pop(settlement.id, None)
        if num_reserved is not None:
            self._account(settlement.name).settle(settlement, num_reserved, has_lapsed=False)

    def follow(self, name: str, standing: Standing) -> None:
        """Begin an account where another store's account was. What is reserved there counts as used: nobody
        will tell this store how much it was."""
        account = self._accounts[name] = Account.of(standing)
        reserved, account.reserved = account.reserved, 0
        account.used_today += reserved
        account.used_this_month += reserved
        account.used_total += reserved

    async def admit(self, ask: Ask) -> Verdict:
        return self.admit_now(ask)

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        for settlement in settlements:
            self.settle_now(settlement)

    async def check(self) -> None:
        """Return: memory can always be used."""

    async def close(self) -> None:
        """Do nothing."""

    def _account(self, name: str) -> Account:
        return self._accounts.setdefault(name, Account())
