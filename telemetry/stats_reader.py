"""The engine's figures for other threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from telemetry.server_figures import StatsThen
from wire.generation import ServerStats

ANSWER_TIMEOUT_S = 1.0
"""An engine answers between two steps. A scrape does not wait for a longer one, or for one that hangs."""


class StatsReader:
    """Asks on the event loop, from any other thread; keeps the last answer."""

    def __init__(
        self, ask: Callable[[], Coroutine[Any, Any, ServerStats]], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._ask = ask
        self._loop = loop
        self._last: tuple[ServerStats, float] | None = None

    def __call__(self) -> StatsThen | None:
        """The figures now, else those of the last time; None if there never were any."""
        question = asyncio.run_coroutine_threadsafe(self._ask(), self._loop)
        try:
            self._last = question.result(ANSWER_TIMEOUT_S), time.monotonic()
        except TimeoutError:
            question.cancel()
        if self._last is None:
            return None
        stats, at_s = self._last
        return StatsThen(stats, time.monotonic() - at_s)
