"""Metrics of cached prompts that servers read from one another."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from telemetry.engine_metrics import NeighbourCacheFigures

COUNTERS = (
    ("read_prefixes", "read", "Cached prompts that were read from other servers into host memory."),
    ("read_bytes", "read_bytes", "Bytes of them."),
    (
        "computed_prefixes",
        "computed",
        "Cached prompts of other servers that were computed: reading would have taken longer, or there was "
        "no room.",
    ),
    ("late_prefixes", "late", "Cached prompts that were computed because reading took longer than expected."),
    ("lent_prefixes", "lent", "Cached prompts that other servers were allowed to read here."),
    ("lent_bytes", "lent_bytes", "Bytes of them."),
    ("handed_over_prefixes", "handed_over", "Cached prompts that other servers took when this one drained."),
)


def neighbour_cache_families(figures: NeighbourCacheFigures) -> Iterator[Metric]:
    """Yields the metrics; all are 0 on servers that neither read nor lend."""
    for name, field, text in COUNTERS:
        yield CounterMetricFamily(f"twinfang_neighbour_cache_{name}", text, getattr(figures, field))
    yield GaugeMetricFamily(
        "twinfang_neighbour_cache_lent_now_bytes",
        "Host memory that other servers may be reading now.",
        figures.lent_now_bytes,
    )
    failures = CounterMetricFamily(
        "twinfang_neighbour_cache_failures",
        "Cached prompts that could not be read from another server, by reason.",
        labels=["kind"],
    )
    for kind, number in figures.failures.items():
        failures.add_metric([kind], number)
    yield failures
