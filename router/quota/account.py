"""The account of one key, and the rules by which it changes. No I/O and no clock.

A rate is a bucket that leaks: what was spent flows off at the rate's speed. So a key may use a minute's worth
at once, and after that as much as flows off. A budget counts what was used since the beginning of its period.
:data:`router.quota.redis_scripts.ADMIT` has the same rules in Lua.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from router.access.key_limits import KeyLimits
from router.quota.limit_store import Settlement, Standing

MINUTE_S = 60.0
DAY_S = 86400.0
ROUNDING = 1e-6
"""What a bucket may be above its limit because of rounding."""


@dataclass
class Account:
    """What a key has used. The fields are those of :class:`Standing`, and when the buckets last leaked."""

    leaked_at_s: float = 0.0
    requests_spent: float = 0.0
    tokens_spent: float = 0.0
    day: int = 0
    used_today: int = 0
    month: int = 0
    used_this_month: int = 0
    used_total: int = 0
    reserved: int = 0

    @classmethod
    def of(cls, standing: Standing) -> Account:
        """Return an account that has this standing."""
        values = asdict(standing)
        return cls(leaked_at_s=values.pop("now_s"), **values)

    def admit(self, limits: KeyLimits, num_tokens: int, now_s: float) -> str | None:
        """Let a request in that reserves ``num_tokens``. Return None, or the limit that refuses it."""
        self._pass_time(limits, now_s)
        refused_by = self._refused_by(limits, num_tokens)
        if refused_by is None:
            self.requests_spent += 1 if limits.requests_per_minute is not None else 0
            self.tokens_spent += num_tokens
            self.reserved += num_tokens
        return refused_by

    def settle(self, settlement: Settlement, num_reserved: int, *, has_lapsed: bool) -> None:
        """Book what a request has used, in the place of what it had reserved."""
        if not has_lapsed:
            self.reserved -= num_reserved
        used = settlement.num_tokens
        self.tokens_spent = max(0.0, self.tokens_spent + used - num_reserved)
        self._begin_periods(settlement.day, settlement.month)
        self.used_today += used if settlement.day == self.day else 0
        self.used_this_month += used if settlement.month == self.month else 0
        self.used_total += used

    def standing(self, now_s: float) -> Standing:
        return Standing(
            now_s,
            self.requests_spent,
            self.tokens_spent,
            self.day,
            self.used_today,
            self.month,
            self.used_this_month,
            self.used_total,
            self.reserved,
        )

    def used_of(self, limits: KeyLimits, now_s: float) -> dict[str, float]:
        """Return how much of each limit is used, running requests' reservations included."""
        self._pass_time(limits, now_s)
        used = {
            "requests_per_minute": self.requests_spent,
            "tokens_per_minute": self.tokens_spent,
            "tokens_per_day": self.used_today + self.reserved,
            "tokens_per_month": self.used_this_month + self.reserved,
            "tokens_total": self.used_total + self.reserved,
        }
        return {name: used[name] for name, _ in limits}

    def _pass_time(self, limits: KeyLimits, now_s: float) -> None:
        minutes = max(0.0, now_s - self.leaked_at_s) / MINUTE_S
        self.leaked_at_s = max(now_s, self.leaked_at_s)
        self.requests_spent = _leaked(self.requests_spent, limits.requests_per_minute, minutes)
        self.tokens_spent = _leaked(self.tokens_spent, limits.tokens_per_minute, minutes)
        self._begin_periods(day_of(now_s), month_of(day_of(now_s)))

    def _begin_periods(self, day: int, month: int) -> None:
        if day > self.day:
            self.day, self.used_today = day, 0
        if month > self.month:
            self.month, self.used_this_month = month, 0

    def _refused_by(self, limits: KeyLimits, num_tokens: int) -> str | None:
        wanted = self.reserved + num_tokens
        for name, limit, would_be in (
            ("tokens_total", limits.tokens_total, self.used_total + wanted),
            ("tokens_per_month", limits.tokens_per_month, self.used_this_month + wanted),
            ("tokens_per_day", limits.tokens_per_day, self.used_today + wanted),
            ("requests_per_minute", limits.requests_per_minute, self.requests_spent + 1),
            ("tokens_per_minute", limits.tokens_per_minute, self.tokens_spent + num_tokens),
        ):
            if limit is not None and would_be > limit + ROUNDING:
                return name
        return None


def _leaked(spent: float, per_minute: int | None, minutes: float) -> float:
    """Return what is left in a bucket. Without a rate, nothing is."""
    return 0.0 if per_minute is None else max(0.0, spent - per_minute * minutes)


def day_of(now_s: float) -> int:
    return int(now_s // DAY_S)


def month_of(day: int) -> int:
    """Return the number of the month since the year 0 that a day, counted since 1970, belongs to.

    Source: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", civil_from_days. It needs integers
    only, so Lua computes the same.
    """
    shifted = day + 719468  # days since March 1 of the year 0
    era, of_era = divmod(shifted, 146097)
    year_of_era = (of_era - of_era // 1460 + of_era // 36524 - of_era // 146096) // 365
    of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    from_march = (5 * of_year + 2) // 153
    return 12 * (year_of_era + 400 * era) + from_march + 2
