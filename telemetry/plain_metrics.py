"""Metrics that one thread writes.

prometheus_client's own metrics take a lock and several calls for each value, because any thread may write
them. A request changes some twenty metrics, all on one event loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from telemetry.histogram import Tally


class Count:
    """A number that is shown as one sample."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount


class PlainCounter(Collector):
    """A counter with labels: :meth:`labels` returns the count of their values."""

    def __init__(
        self, name: str, documentation: str, label_names: Sequence[str], *, registry: CollectorRegistry
    ) -> None:
        self._name, self._documentation, self._label_names = name, documentation, label_names
        self._counts: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def labels(self, *values: str) -> Count:
        count = self._counts.get(values)
        if count is None:
            count = self._counts[values] = Count()
        return count

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._documentation, labels=self._label_names)
        for values, count in self._counts.items():
            family.add_metric(values, count.value)
        yield family


class PlainCount(Count, Collector):
    """A counter without labels."""

    def __init__(self, name: str, documentation: str, *, registry: CollectorRegistry) -> None:
        super().__init__()
        self._name, self._documentation = name, documentation
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._documentation, value=self.value)


class PlainGauge(PlainCount):
    """A gauge without labels."""

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(self._name, self._documentation, value=self.value)


class LabelledHistogram(Collector):
    """A histogram with labels: :meth:`labels` returns the histogram of their values."""

    def __init__(
        self,
        name: str,
        documentation: str,
        label_names: Sequence[str],
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._documentation, self._label_names = name, documentation, label_names
        self._buckets = buckets
        self._tallies: dict[tuple[str, ...], Tally] = {}
        registry.register(self)

    def labels(self, *values: str) -> Tally:
        tally = self._tallies.get(values)
        if tally is None:
            tally = self._tallies[values] = Tally(self._buckets)
        return tally

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._label_names)
        for values, tally in self._tallies.items():
            tally.put_into(family, values)
        yield family


class PlainHistogram(Collector):
    """A histogram without labels."""

    def __init__(
        self, name: str, documentation: str, *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._documentation = name, documentation
        self._tally = Tally(buckets)
        self.observe = self._tally.add
        """Counts a value. It is the tally's own method, with no call in between."""
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation)
        self._tally.put_into(family)
        yield family
