"""Reserves what a request may use, and settles what it has used."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping

from starlette.types import Scope

from router.access.api_keys import ApiKey
from router.quota.account import Account
from router.quota.limit_store import Ask, Standing
from router.quota.limiter import Limiter, Settle, settle_nothing
from router.quota.metrics import QuotaMetrics
from router.quota.rate_headers import rate_headers
from router.quota.refusal import refusal_of

UNSTATED_ANSWER_TOKENS = 1024
"""What is reserved for an answer whose client has not limited it. Otherwise it would be all that the model's
context still holds, which few answers need."""


MAX_STANDINGS = 10_000
"""How many keys' standings are kept. An issuer of tokens may know more tenants."""


class Reservation:
    """What a request may use of its key's limits. It is settled once; later calls do nothing."""

    __slots__ = ("_settle", "headers")

    def __init__(self, headers: Mapping[str, str], settle: Settle | None) -> None:
        self.headers = headers
        """Headers of the answer that say what is left."""
        self._settle = settle

    def settle(self, num_tokens: int) -> None:
        """Book what the request has used."""
        settle, self._settle = self._settle, None
        if settle is not None:
            settle(num_tokens)

    def release(self) -> None:
        """Book that the request has used nothing, unless something else is booked already."""
        self.settle(0)


UNLIMITED = Reservation({}, None)
"""The reservation of all requests without limits."""

RESERVATION = "reservation"
"""Where a request's state keeps its reservation."""


def release_unsettled(scope: Scope) -> None:
    """Release what a request has reserved and nobody has settled, for example because its client was gone
    before the answer began. To be called at the end of every request."""
    reservation = scope["state"].pop(RESERVATION, None)
    if isinstance(reservation, Reservation):
        reservation.release()


class Quota:
    """Applies the limits of keys."""

    def __init__(self, limiter: Limiter, metrics: QuotaMetrics) -> None:
        self.limiter = limiter
        self._metrics = metrics
        self._standings: OrderedDict[str, Standing] = OrderedDict()
        """The last standing of the keys that this process has heard of last."""

    async def reserve(self, key: ApiKey, num_tokens: int, *, path: str, lasts_s: float) -> Reservation:
        """Reserve what a request may use. ``path`` says in which API's form the headers are.

        Raises :class:`RateLimitError` and :class:`QuotaError`.
        """
        limits = key.limits
        if limits is None:
            return UNLIMITED
        num_reserved = num_tokens if limits.counts_tokens else 0
        ask = Ask(secrets.token_hex(16), key.name, limits, num_reserved, lasts_s)
        admission = await self.limiter.admit(ask)
        self._note(key.name, admission.verdict.standing)
        headers = rate_headers(path, limits, admission.verdict.standing)
        if admission.verdict.refused_by is not None:
            self._metrics.refused(key.name, admission.verdict.refused_by)
            error = refusal_of(key, num_tokens, admission.verdict)
            error.headers = {**error.headers, **headers}
            raise error
        settle = admission.settle
        return Reservation(headers, None if settle is settle_nothing else settle)

    def _note(self, name: str, standing: Standing) -> None:
        self._standings[name] = standing
        self._standings.move_to_end(name)
        if len(self._standings) > MAX_STANDINGS:
            self._standings.popitem(last=False)

    def used_of(self, key: ApiKey) -> dict[str, float]:
        """Return how much of each of a key's limits was used when this process last heard of it, less what
        time has given back since."""
        if key.limits is None:
            return {}
        standing = self._standings.get(key.name, Standing(time.time()))
        return Account.of(standing).used_of(key.limits, time.time())


def reserved_for(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> int:
    """Return how many tokens to reserve for one answer, its prompt not counted."""
    is_stated = num_prompt_tokens + max_tokens < max_model_len
    return max_tokens if is_stated else min(max_tokens, UNSTATED_ANSWER_TOKENS)
