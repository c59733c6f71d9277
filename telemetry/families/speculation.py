"""Metrics of speculative decoding: how many drafts decode servers try and accept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from wire.messages.generation import ServerStats

PREFIX = "twinfang_spec_decode"


def speculation_families(
    labels: Sequence[str], servers: Mapping[tuple[str, ...], ServerStats]
) -> Iterator[Metric]:
    """Yield metrics that servers count themselves. ``servers`` has each server's stats; the key is the values
    of ``labels`` for that server.

    Servers count from their own start. So a restarted server begins at 0 again, as Prometheus expects.
    """
    drafted = CounterMetricFamily(f"{PREFIX}_num_draft_tokens", "Drafts tried.", labels=labels)
    accepted = CounterMetricFamily(
        f"{PREFIX}_num_accepted_tokens", "Drafts that were accepted.", labels=labels
    )
    drafted_at = CounterMetricFamily(
        f"{PREFIX}_num_draft_tokens_per_pos",
        "Drafts tried, by their position among a step's drafts, from 0.",
        labels=[*labels, "position"],
    )
    accepted_at = CounterMetricFamily(
        f"{PREFIX}_num_accepted_tokens_per_pos",
        "Drafts that were accepted, by their position among a step's drafts, from 0.",
        labels=[*labels, "position"],
    )
    mean_length = GaugeMetricFamily(
        f"{PREFIX}_mean_accepted_length",
        "Tokens that a request gains in a step with drafts, the bonus token included; since the start.",
        labels=labels,
    )
    for values, stats in servers.items():
        tried, right = stats.drafted_by_position, stats.accepted_by_position
        drafted.add_metric(values, sum(tried))
        accepted.add_metric(values, sum(right))
        for family, counts in ((drafted_at, tried), (accepted_at, right)):
            for position, count in enumerate(counts):
                family.add_metric([*values, str(position)], count)
        if tried and tried[0]:  # each row with drafts tries a first draft
            mean_length.add_metric(values, 1 + sum(right) / tried[0])
    yield from (drafted, accepted, drafted_at, accepted_at, mean_length)
