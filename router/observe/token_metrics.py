"""What is measured for every single token, as Prometheus metrics.

The client library's counters take a lock and several calls each. Tens of thousands of tokens arrive each
second, all on the event loop. So tokens are counted in plain numbers, which are turned into metrics at each
scrape.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.observe.window import WindowSum
from telemetry.histogram import Tally

SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class TokenMetrics(Collector):
    """Counts tokens and the time between them. Times are seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._gaps = Tally(SHORT_S)
        self._recent = WindowSum()
        self._run = (0, 0.0, 0.0)
        """What the newest choices have in common: the number of tokens of each, and both their times."""
        self._run_length = 0
        """The number of these choices. They are not counted yet."""

    @property
    def recent(self) -> WindowSum:
        """Tokens of the last minute."""
        self._count_run()
        return self._recent

    def first(self, num_tokens: int, now_s: float) -> None:
        """Count a choice's first tokens, which came together."""
        self._num_tokens += num_tokens
        self._recent.add(num_tokens, now_s)

    def later(self, num_tokens: int, now_s: float, before_s: float) -> None:
        """Count a choice's further tokens, which came together at ``now_s``. They share the time since
        ``before_s``, when the tokens before them came.

        The choices of one step mostly differ in nothing, so that they can be counted together.
        """
        run = (num_tokens, now_s, before_s)
        if run != self._run:
            self._count_run()
            self._run = run
        self._run_length += 1

    def _count_run(self) -> None:
        if not self._run_length:
            return
        num_tokens, now_s, before_s = self._run
        together, self._run_length = num_tokens * self._run_length, 0
        self._num_tokens += together
        self._gaps.add((now_s - before_s) / num_tokens, together)
        self._recent.add(together, now_s)

    def collect(self) -> Iterator[Metric]:
        self._count_run()
        yield CounterMetricFamily(
            "twinfang_generation_tokens", "Tokens generated, over all choices.", value=self._num_tokens
        )
        gaps = HistogramMetricFamily(
            "twinfang_inter_token_latency_seconds",
            "Time between two tokens of a choice; tokens that come together share the time.",
        )
        self._gaps.put_into(gaps)
        yield gaps
