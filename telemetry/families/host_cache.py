"""Metrics of cached prompts in host memory."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from telemetry.engine_metrics import HostCacheFigures

GAUGES = (
    ("size_bytes", "size_bytes", "Host memory for cached prompts, of one rank: --host-cache-size."),
    ("used_bytes", "used_bytes", "Host memory that holds cached prompts, of one rank."),
)
COUNTERS = (
    ("demoted_prefixes", "demoted", "Cached prompts that moved from the device to host memory."),
    ("promoted_prefixes", "promoted", "Cached prompts that moved back to the device for a request."),
    ("promoted_tokens", "promoted_tokens", "Prompt tokens that were not computed because of that."),
    (
        "dropped_prefixes",
        "dropped",
        "Cached prompts that the device gave up and host memory did not take: no room, or a full step.",
    ),
)


def host_cache_families(figures: HostCacheFigures) -> Iterator[Metric]:
    """Yields the metrics; all are 0 without host memory."""
    for name, field, text in GAUGES:
        yield GaugeMetricFamily(f"twinfang_host_cache_{name}", text, getattr(figures, field))
    for name, field, text in COUNTERS:
        yield CounterMetricFamily(f"twinfang_host_cache_{name}", text, getattr(figures, field))
