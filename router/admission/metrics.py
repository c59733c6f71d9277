"""Prometheus metrics of each model's places, queue and waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.admission.gate import Gate
from router.admission.hold import Hold


class GateMetrics(Collector):
    """Reads the values from all gates and holds each time Prometheus asks for metrics."""

    def __init__(self) -> None:
        self._gates: Mapping[str, tuple[Gate, Hold]] = {}

    def update(self, gates: Mapping[str, tuple[Gate, Hold]]) -> None:
        """Set the gates to read, by the name of the model."""
        self._gates = gates

    def collect(self) -> Iterator[Metric]:
        queued = GaugeMetricFamily(
            "twinfang_requests_queued", "HTTP requests that wait for their turn.", labels=["model"]
        )
        places = GaugeMetricFamily(
            "twinfang_places",
            "Choices that may be in flight, as far as servers have room.",
            labels=["model"],
        )
        held = GaugeMetricFamily(
            "twinfang_requests_held",
            "Queued HTTP requests that wait for a server to come back, since none serves their model.",
            labels=["model"],
        )
        held_choices = GaugeMetricFamily(
            "twinfang_choices_held",
            "Choices in flight that wait for a server to come back, since none can go on with them.",
            labels=["model"],
        )
        taken = GaugeMetricFamily("twinfang_places_taken", "Choices that are in flight.", labels=["model"])
        for model, (gate, hold) in self._gates.items():
            queued.add_metric([model], gate.num_waiting)
            held.add_metric([model], gate.num_held)
            held_choices.add_metric([model], hold.num_waiting)
            places.add_metric([model], gate.places)
            taken.add_metric([model], gate.num_in_flight)
        yield from (queued, held, held_choices, places, taken)
