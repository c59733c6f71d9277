"""Says why a request is refused, and when it would be taken."""

from __future__ import annotations

import calendar
import math
import time

from router.access.api_keys import ApiKey
from router.quota.account import DAY_S, MINUTE_S
from router.quota.limit_store import Standing, Verdict
from wire.errors import OverloadedError, QuotaError, RateLimitError

NO_RETRY = {"x-should-retry": "false"}
"""Tells the clients of OpenAI and Anthropic that the same request would be refused again."""
RUNNING_RETRY_S = 1
"""``Retry-After`` of a request that has no room only because of what running requests have reserved."""
PERIODS = {"tokens_per_day": "today", "tokens_per_month": "this month", "tokens_total": "in all"}


def refusal_of(key: ApiKey, num_tokens: int, verdict: Verdict) -> OverloadedError:
    """Return the error for a request that needs ``num_tokens`` and was refused."""
    name, standing = verdict.refused_by or "", verdict.standing
    limit = int(getattr(key.limits, name))
    whose = f"API key {key.name!r} has {name}={limit}"
    if name == "requests_per_minute":
        wait_s = _wait_s(standing.requests_spent + 1, limit)
        return RateLimitError(
            f"{whose}, and has sent as many requests: send this one again in {wait_s} s, or ask the operator "
            "for a higher limit",
            retry_after_s=wait_s,
        )
    needs = f"this request needs up to {num_tokens} tokens (its prompt's and its answers' greatest length)"
    if num_tokens > limit:
        error = RateLimitError(
            f"{whose}, and {needs}: shorten the prompt, lower the greatest length of the answer, or ask the "
            "operator for a higher limit",
            retry_after_s=None,
        )
        error.headers = NO_RETRY
        return error
    if name == "tokens_per_minute":
        wait_s = _wait_s(standing.tokens_spent + num_tokens, limit)
        return RateLimitError(
            f"{whose}, {math.ceil(standing.tokens_spent)} of them are in use, and {needs}: send it again in "
            f"{wait_s} s, lower the greatest length of the answer, or ask the operator for a higher limit",
            retry_after_s=wait_s,
        )
    return _over_budget(name, limit, num_tokens, standing, f"{whose}, and {needs}")


def _over_budget(name: str, limit: int, num_tokens: int, standing: Standing, said: str) -> OverloadedError:
    used, ends_s = _used(name, standing)
    state = f"{used} tokens are used {PERIODS[name]}, {standing.reserved} are reserved by running requests"
    if used + num_tokens <= limit:
        return RateLimitError(
            f"{said}; {state}: send it again when a running request has ended, or lower the greatest length "
            "of the answer",
            retry_after_s=RUNNING_RETRY_S,
        )
    wait_s = None if ends_s is None else max(1, math.ceil(ends_s - standing.now_s))
    again = "" if ends_s is None else f"send it after {_utc(ends_s)}, "
    error = QuotaError(
        f"{said}; {state}: {again}lower the greatest length of the answer, or ask the operator for a larger "
        "budget",
        retry_after_s=wait_s,
    )
    error.headers = NO_RETRY
    return error


def _used(name: str, standing: Standing) -> tuple[int, float | None]:
    """Return what is used of a budget, and when its period ends."""
    if name == "tokens_per_day":
        return standing.used_today, (standing.day + 1) * DAY_S
    if name == "tokens_per_month":
        year, month = divmod(standing.month + 1, 12)
        return standing.used_this_month, calendar.timegm((year, month + 1, 1, 0, 0, 0))
    return standing.used_total, None


def _wait_s(would_be: float, per_minute: int) -> int:
    """Return after how many seconds as much has leaked as is too much."""
    return max(1, math.ceil((would_be - per_minute) * MINUTE_S / per_minute))


def _utc(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at_s))
