"""Metrics of cached prompts in files."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from telemetry.engine_metrics import FileCacheFigures

GAUGES = (
    ("size_bytes", "size_bytes", "What files with cached prompts may take: --file-cache-size."),
    ("used_bytes", "used_bytes", "What files with cached prompts take."),
    (
        "incomplete_prefixes",
        "incomplete",
        "Cached prompts in files of which some tensor-parallel ranks lack their share: they are not read.",
    ),
)
COUNTERS = (
    ("read_prefixes", "read", "Cached prompts that were read from files into host memory."),
    ("read_bytes", "read_bytes", "Bytes of them."),
    ("written_prefixes", "written", "Cached prompts that were written from host memory to files."),
    ("written_bytes", "written_bytes", "Bytes of them."),
    (
        "dropped_prefixes",
        "dropped",
        "Cached prompts that host memory gave up before they were written, or for which there was no room.",
    ),
    (
        "computed_prefixes",
        "computed",
        "Cached prompts in files that were computed: reading would have taken longer, or there was no room.",
    ),
    ("late_prefixes", "late", "Cached prompts that were computed because reading took longer than expected."),
    ("purged_prefixes", "purged", "Cached prompts in files that purges have deleted."),
)


def file_cache_families(figures: FileCacheFigures) -> Iterator[Metric]:
    """Yields the metrics; all are 0 without files."""
    for name, field, text in GAUGES:
        yield GaugeMetricFamily(f"twinfang_file_cache_{name}", text, figures.total(field))
    for name, field, text in COUNTERS:
        yield CounterMetricFamily(f"twinfang_file_cache_{name}", text, figures.total(field))
    failures = CounterMetricFamily(
        "twinfang_file_cache_failures",
        "What was wrong with files of cached prompts, and what the file system refused.",
        labels=["kind"],
    )
    for kind, number in figures.all_failures().items():
        failures.add_metric([kind], number)
    yield failures
