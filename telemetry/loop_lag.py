"""How late an event loop runs what is due: whatever it serves waits as long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from telemetry.histogram import Tally

INTERVAL_S = 0.25
RECENT_S = 10.0
LIMIT_S = 1.0
"""Who is this late with everything serves nobody well."""
STARVED_S = 10.0
"""How long each look must have been beyond the limit: one long callback is over by then, and a new process
would serve what is under way worse."""
HUNG_S = 30.0
"""A loop that has not come to its look for so long does not come any more."""
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class LoopLag(Collector):
    """A call that the loop makes to itself four times a second, and how late each one came.

    Made on the running loop; other threads may read.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tally = Tally(BOUNDS_S)
        self._recent: deque[tuple[float, float]] = deque()
        """When a look was made, and how late."""
        self._late_since_s: float | None = None
        self._due_s = 0.0
        self._call_later()

    def close(self) -> None:
        self._timer.cancel()

    def saw(self, lag_s: float, now_s: float) -> None:
        """A look that came ``lag_s`` late."""
        self._tally.add(lag_s)
        self._recent.append((now_s, lag_s))
        while self._recent[0][0] < now_s - RECENT_S:
            self._recent.popleft()
        if lag_s <= LIMIT_S:
            self._late_since_s = None
        elif self._late_since_s is None:
            self._late_since_s = now_s

    @property
    def worst_s(self) -> float:
        """Of the last ten seconds."""
        return max((lag_s for _, lag_s in list(self._recent)), default=0.0)

    @property
    def is_starved(self) -> bool:
        """Whether each look of the last ten seconds was beyond the limit."""
        since_s = self._late_since_s
        return since_s is not None and self._loop.time() - since_s >= STARVED_S

    @property
    def has_hung(self) -> bool:
        """Whether the next look is long overdue. For other threads: the loop's own could not ask."""
        return self._loop.time() - self._due_s > HUNG_S

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "twinfang_event_loop_lag_seconds",
            "How late the event loop came to a call that was due, four of which there are a second.",
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
