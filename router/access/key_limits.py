"""How much the requests of an API key may use: the limits that stand in its line of the keys file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

MAX_LIMIT = 10**15
"""The highest limit. Stores count in doubles, which hold every integer up to nine times as much."""


@dataclass(frozen=True)
class KeyLimits:
    """Limits of one key. None: no limit. A token is one of a prompt or one of an answer."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    """A budget that begins again at each midnight, UTC."""
    tokens_per_month: int | None = None
    """A budget that begins again with each month, UTC."""
    tokens_total: int | None = None
    """A budget that never begins again."""

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield names and values of the limits that are set."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                yield field.name, value

    @property
    def counts_tokens(self) -> bool:
        return any(name.startswith("tokens") for name, _ in self)

    @property
    def has_budget(self) -> bool:
        """Whether there is a limit that time alone does not restore within a minute."""
        return any(name not in RATES for name, _ in self)


LIMIT_NAMES = tuple(field.name for field in fields(KeyLimits))
"""The options of a line that are limits."""
RATES = ("requests_per_minute", "tokens_per_minute")
