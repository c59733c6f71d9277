"""How late an event loop runs a call that is due. Everything else that the loop serves is delayed as much.
Four times a second the loop makes a *look*: a call to itself that notes how late it came."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from telemetry.histogram import Tally

INTERVAL_S = 0.25
RECENT_S = 10.0
NUM_RECENT = round(RECENT_S / INTERVAL_S) + 1
LIMIT_S = 1.0
"""A loop that is this late with everything serves no client well."""
STARVED_S = 10.0
"""A loop is starved if, for this long, each look came later than :data:`LIMIT_S`. A single long callback is
over by then, and starting a new process because of it would only harm the requests under way."""
HUNG_S = 30.0
"""A loop whose look is overdue for this long is taken to hang for good."""
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class LoopLag(Collector):
    """Lets the running loop make its looks, and counts how late they came.

    Create it on the running loop; other threads may read.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tally = Tally(BOUNDS_S)
        self._looks_s = array("d", [float("-inf")] * NUM_RECENT)
        """When the last looks were made: a ring, as the looks' lags."""
        self._lags_s = array("d", [0.0] * NUM_RECENT)
        self._next = 0
        self._late_since_s: float | None = None
        self._due_s = 0.0
        self._call_later()

    def close(self) -> None:
        self._timer.cancel()

    def saw(self, lag_s: float, now_s: float) -> None:
        """Note a look that came ``lag_s`` late."""
        self._tally.add(lag_s)
        self._looks_s[self._next], self._lags_s[self._next] = now_s, lag_s
        self._next = (self._next + 1) % NUM_RECENT
        if lag_s <= LIMIT_S:
            self._late_since_s = None
        elif self._late_since_s is None:
            self._late_since_s = now_s

    @property
    def worst_s(self) -> float:
        """The greatest lag of the last ten seconds."""
        since_s = max(self._looks_s) - RECENT_S
        looks = zip(self._looks_s, self._lags_s, strict=True)
        return max((lag_s for made_s, lag_s in looks if made_s >= since_s), default=0.0)

    @property
    def is_starved(self) -> bool:
        """Whether each look of the last ten seconds came later than the limit."""
        since_s = self._late_since_s
        return since_s is not None and self._loop.time() - since_s >= STARVED_S

    @property
    def has_hung(self) -> bool:
        """Whether the next look is long overdue. Other threads ask this, because the thread of a loop that
        hangs can't ask."""
        return self._loop.time() - self._due_s > HUNG_S

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "twinfang_event_loop_lag_seconds",
            "How late the event loop ran a call that was due; there are four such calls a second.",
        )
        self._tally.put_into(family)
        yield family

    def _look(self) -> None:
        now_s = self._loop.time()
        self.saw(max(0.0, now_s - self._due_s), now_s)
        self._call_later()

    def _call_later(self) -> None:
        self._due_s = self._loop.time() + INTERVAL_S
        self._timer = self._loop.call_at(self._due_s, self._look)
