"""Leases, reads under way and failed handoffs of all servers, in Prometheus' form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from wire.generation import ServerStats


class TransferFigures(Collector):
    """Shows what servers count themselves, as of the last :meth:`update`.

    They count from their own start, so a restarted server starts at 0 again, as Prometheus expects it. A
    handoff that failed shows here even if a retry served the request.
    """

    def __init__(self) -> None:
        self._stats: Mapping[str, ServerStats] = {}

    def update(self, stats: Mapping[str, ServerStats]) -> None:
        """``stats`` by address; a server that is not among them is shown no longer."""
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        failures = CounterMetricFamily(
            "twinfang_transfer_failures",
            "Tickets whose state did not come, by cause, at the server that was to read it.",
            labels=["server", "cause"],
        )
        leases = CounterMetricFamily(
            "twinfang_leases_ended",
            "Leases that are over, by reason: done (read), ended (given back), expired (not read in time).",
            labels=["server", "reason"],
        )
        for server, stats in self._stats.items():
            for family, counts in ((failures, stats.transfer_failures), (leases, stats.leases_ended)):
                for label, count in counts.items():
                    family.add_metric([server, label], count)
        yield from (failures, leases)

    def _gauges(self) -> Iterator[Metric]:
        for name, field, text in (
            ("twinfang_leases_held", "leases_held", "Leases on memory that others may read."),
            ("twinfang_transfers_in_flight", "transfers_in_flight", "Reads from other servers under way."),
            (
                "twinfang_quarantined_blocks",
                "quarantined_blocks",
                "Blocks out of use, since bytes of a read that was given up may still land there.",
            ),
            ("twinfang_quarantined_slots", "quarantined_slots", "State slots out of use for that reason."),
        ):
            family = GaugeMetricFamily(name, text, labels=["server"])
            for server, stats in self._stats.items():
                family.add_metric([server], getattr(stats, field))
            yield family
