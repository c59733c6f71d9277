"""Metrics of discovery."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.kubernetes.cluster_error import CAUSES

PodState = Literal["ready", "not_ready", "terminating", "other_model", "unusable"]
EVENTS = ("added", "modified", "deleted", "bookmark")


class DiscoveryMetrics(Collector):
    """Metrics of discovery. The parts of discovery count in this object's attributes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._contact_s = clock()
        self.events: Counter[str] = Counter()
        """Number of the watch's events, by type in lower case."""
        self.relists: Counter[str] = Counter()
        """How often pods were listed again. The keys say what had ended the list or watch before."""
        self.pods: Counter[PodState] = Counter()
        """Number of present pods, by state."""

    def contact(self) -> None:
        """Note that the API server has said something."""
        self._contact_s = self._clock()

    def collect(self) -> Iterator[Metric]:
        events = CounterMetricFamily(
            "twinfang_discovery_events", "Events of the watch of pods, by type.", labels=["event"]
        )
        relists = CounterMetricFamily(
            "twinfang_discovery_relists",
            "How often pods were listed again, by what ended the list or watch before.",
            labels=["cause"],
        )
        age = GaugeMetricFamily(
            "twinfang_discovery_contact_age_seconds",
            "Time since the Kubernetes API last said anything, bookmarks included; at first, since start.",
        )
        pods = GaugeMetricFamily("twinfang_discovery_pods", "Pods that match, by state.", labels=["state"])
        for name in EVENTS:
            events.add_metric([name], self.events[name])
        for cause in ("ended", *CAUSES):
            relists.add_metric([cause], self.relists[cause])
        for state in get_args(PodState):
            pods.add_metric([state], self.pods[state])
        age.add_metric([], self._clock() - self._contact_s)
        yield from (events, relists, age, pods)
