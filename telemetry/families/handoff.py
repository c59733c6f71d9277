"""Metrics of servers' leases, of their reads under way and of failed handoffs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from wire.messages.generation import ServerStats

GAUGES = (
    ("twinfang_leases_held", "leases_held", "Leases on memory that others may read."),
    ("twinfang_transfers_in_flight", "transfers_in_flight", "Reads from other servers under way."),
    (
        "twinfang_quarantined_blocks",
        "quarantined_blocks",
        "Blocks out of use, since bytes of a read that was given up may still land there.",
    ),
    ("twinfang_quarantined_slots", "quarantined_slots", "State slots out of use for that reason."),
)


def handoff_families(
    labels: Sequence[str], servers: Mapping[tuple[str, ...], ServerStats]
) -> Iterator[Metric]:
    """Yield metrics that servers count themselves since their start. ``servers`` has each server's stats;
    the key is the values of ``labels`` for that server.

    A handoff that failed counts here even if a retry served the request.
    """
    for name, field, text in GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=labels)
        for values, stats in servers.items():
            gauge.add_metric(values, getattr(stats, field))
        yield gauge
    failures = CounterMetricFamily(
        "twinfang_transfer_failures",
        "Tickets whose state did not come, by cause, at the server that should have read it.",
        labels=[*labels, "cause"],
    )
    leases = CounterMetricFamily(
        "twinfang_leases_ended",
        "Leases that are over, by reason: done (read), ended (given back), expired (not read in time).",
        labels=[*labels, "reason"],
    )
    for values, stats in servers.items():
        for family, counts in ((failures, stats.transfer_failures), (leases, stats.leases_ended)):
            for label, count in counts.items():
                family.add_metric([*values, label], count)
    yield from (failures, leases)
