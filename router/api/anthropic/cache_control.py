"""``cache_control``: marks that say up to where a prompt should be cached, and for how long.

Servers cache prompts by themselves, so the places have no effect. If the request belongs to a session, what
it leaves is retained for the longest time that a mark asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.http.openai_errors import shown
from wire.errors import InvalidRequestError

MAX_MARKS = 4
"""A request may have this many marks, as in Anthropic's API."""
LIFETIMES = (None, "5m", "1h")
"""From short to long. None stands for the first time after it."""


class CacheMarks:
    """Counts the marks of one request."""

    def __init__(self) -> None:
        self._num = 0
        self._longest = 0

    @property
    def longest(self) -> str | None:
        """The longest time of any mark; None without a mark."""
        return LIFETIMES[max(1, self._longest)] if self._num else None

    def check(self, marked: Mapping[str, Any], where: str) -> None:
        """Check the mark of a block, a tool or the whole body, if it has one. Raises
        :class:`InvalidRequestError`."""
        mark = marked.get("cache_control")
        if mark is None:
            return
        where = f"{where}.cache_control" if where else "cache_control"
        is_known = isinstance(mark, dict) and mark.get("type") == "ephemeral"
        if not (is_known and mark.get("ttl") in LIFETIMES):
            raise InvalidRequestError(
                f"{where} must be an object of type 'ephemeral' whose ttl, if it has one, is '5m' or '1h', "
                f"got {shown(mark)}"
            )
        self._longest = max(self._longest, LIFETIMES.index(mark.get("ttl")))
        self._num += 1
        if self._num > MAX_MARKS:
            raise InvalidRequestError(
                f"{where} is mark number {self._num} of the request, the limit is {MAX_MARKS}: mark fewer "
                "blocks"
            )
