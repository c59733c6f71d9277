"""Counts the HTTP requests that got an error in place of an answer."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from wire.errors import all_statuses

OF_HTTP = (404, 405, 431)
"""Statuses without an error class of ours: unknown paths and methods, and heads that are too large."""


class Refusals(Collector):
    """One counter for each status from 400 on. Answers to probes don't count: a router that is not ready says
    so every few seconds."""

    def __init__(self, uncounted_paths: Iterable[str] = ()) -> None:
        self._uncounted = frozenset(uncounted_paths)
        self._numbers = dict.fromkeys(sorted({*OF_HTTP, *all_statuses()}), 0)

    def count(self, status: int, path: str = "") -> None:
        """Count one answer. ``path`` is empty if the request had none that could be read."""
        if path not in self._uncounted:
            self._numbers[status] = self._numbers.get(status, 0) + 1

    def collect(self) -> Iterable[Metric]:
        counter = CounterMetricFamily(
            "twinfang_refused_requests",
            "HTTP requests of all paths but probes that were answered with an error, by status.",
            labels=["status"],
        )
        for status, number in self._numbers.items():
            counter.add_metric([str(status)], number)
        yield counter
