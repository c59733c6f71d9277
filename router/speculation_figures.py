"""How well the decode servers' drafts do, in Prometheus' form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from wire.generation import ServerStats

PREFIX = "twinfang_spec_decode"


class SpeculationFigures(Collector):
    """Shows what decode servers count themselves, as of the last :meth:`update`.

    They count from their own start, so a restarted server starts at 0 again, as Prometheus expects it.
    """

    def __init__(self) -> None:
        self._stats: Mapping[str, ServerStats] = {}

    def update(self, stats: Mapping[str, ServerStats]) -> None:
        """``stats`` by address; a server that is not among them is shown no longer."""
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        drafted = CounterMetricFamily(f"{PREFIX}_num_draft_tokens", "Drafts tried.", labels=["server"])
        accepted = CounterMetricFamily(
            f"{PREFIX}_num_accepted_tokens", "Drafts that were accepted.", labels=["server"]
        )
        drafted_at = CounterMetricFamily(
            f"{PREFIX}_num_draft_tokens_per_pos",
            "Drafts tried, by their position among a step's drafts, from 0.",
            labels=["server", "position"],
        )
        accepted_at = CounterMetricFamily(
            f"{PREFIX}_num_accepted_tokens_per_pos",
            "Drafts that were accepted, by their position among a step's drafts, from 0.",
            labels=["server", "position"],
        )
        mean_length = GaugeMetricFamily(
            f"{PREFIX}_mean_accepted_length",
            "Tokens that a request gains in a step with drafts, the bonus token included; since the start.",
            labels=["server"],
        )
        for server, stats in self._stats.items():
            tried, right = stats.drafted_by_position, stats.accepted_by_position
            drafted.add_metric([server], sum(tried))
            accepted.add_metric([server], sum(right))
            for family, counts in ((drafted_at, tried), (accepted_at, right)):
                for position, count in enumerate(counts):
                    family.add_metric([server, str(position)], count)
            if tried and tried[0]:  # each row with drafts tries a first one
                mean_length.add_metric([server], 1 + sum(right) / tried[0])
        yield from (drafted, accepted, drafted_at, accepted_at, mean_length)
