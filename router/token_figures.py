"""What is measured of every single token, in Prometheus' form.

The client library's counters take a lock and several calls each. Tokens come by the ten thousand a second,
all on the event loop, so they are counted in plain numbers here and put into that form when somebody looks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.window import WindowSum

SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class TokenFigures(Collector):
    """Counts tokens and the time between them. Times are seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._counts = [0] * (len(SHORT_S) + 1)
        self._sum_s = 0.0
        self.recent = WindowSum()
        """Tokens of the last minute."""

    def first(self, num_tokens: int, now_s: float) -> None:
        """A choice's first tokens, which came together."""
        self._num_tokens += num_tokens
        self.recent.add(num_tokens, now_s)

    def later(self, num_tokens: int, now_s: float, before_s: float) -> None:
        """Further ones, which share the time since the last."""
        gap_s = (now_s - before_s) / num_tokens
        self._num_tokens += num_tokens
        self._counts[bisect_left(SHORT_S, gap_s)] += 1
        self._sum_s += gap_s
        self.recent.add(num_tokens, now_s)

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(str, SHORT_S), "+Inf"]
        yield CounterMetricFamily(
            "twinfang_generation_tokens", "Tokens generated, over all choices.", value=self._num_tokens
        )
        yield HistogramMetricFamily(
            "twinfang_inter_token_latency_seconds",
            "Time between two tokens of a choice; tokens that come together share it.",
            buckets=list(zip(bounds, accumulate(self._counts), strict=True)),
            sum_value=self._sum_s,
        )
