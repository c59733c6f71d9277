"""Waiting until something is so, with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

PROMPT_S = 15.0
"""What takes no deadline's expiry is over by then, on a loaded machine too."""
TIMEOUT_S = 60.0
"""Of what is over in milliseconds on a machine that has time for it."""
POLL_INTERVAL_S = 0.02
TURN_INTERVAL_S = 0.005


def wait_until(
    condition: Callable[[], object],
    what: str = "the condition is true",
    timeout_s: float = PROMPT_S,
    *,
    interval_s: float = POLL_INTERVAL_S,
) -> None:
    """Returns once ``condition()`` is true; :class:`AssertionError` with ``what`` at the deadline."""
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
    """As :func:`wait_until`, of this event loop; ``condition`` may be a coroutine function.

    Servers, router and client may share the loop: where it stood still for long, it gets a second's turns.
    """
    limit, turns_left = time.monotonic() + timeout_s, 1 / TURN_INTERVAL_S
    while True:
        holds = condition()
        if await holds if inspect.isawaitable(holds) else holds:
            return
        assert time.monotonic() < limit or turns_left > 0, f"not within {timeout_s} s: {what}"
        turns_left -= 1
        await asyncio.sleep(interval_s)
