"""Wait until a condition is true, with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

PROMPT_S = 15.0
"""Operations that don't wait for a deadline take less time than this, even on a loaded machine."""
TIMEOUT_S = 60.0
"""Deadline for operations that take milliseconds on an idle machine."""
POLL_INTERVAL_S = 0.02
TURN_INTERVAL_S = 0.005


def wait_until(
    condition: Callable[[], object],
    what: str = "the condition is true",
    timeout_s: float = PROMPT_S,
    *,
    interval_s: float = POLL_INTERVAL_S,
) -> None:
    """Return once ``condition()`` is true. Raise :class:`AssertionError` with ``what`` at the deadline."""
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, f"not within {timeout_s} s: {what}"
        time.sleep(interval_s)


async def until(
    condition: Callable[[], object],
    what: str = "the condition is true",
    *,
    timeout_s: float = TIMEOUT_S,
    interval_s: float = TURN_INTERVAL_S,
) -> None:
    """Do the same as :func:`wait_until` in this event loop. ``condition`` may be a coroutine function.

    Servers, router and client may share the loop. Therefore the condition is checked at least as often as in
    one second of normal polling, even if the loop stood still until the deadline.
    """
    limit, turns_left = time.monotonic() + timeout_s, 1 / TURN_INTERVAL_S
    while True:
        holds = condition()
        if await holds if inspect.isawaitable(holds) else holds:
            return
        assert time.monotonic() < limit or turns_left > 0, f"not within {timeout_s} s: {what}"
        turns_left -= 1
        await asyncio.sleep(interval_s)
