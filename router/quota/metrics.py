"""Prometheus metrics of keys' limits."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

CALL_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class StoreMetrics:
    """How the store does that processes share."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.up = Gauge(
            "twinfang_limit_store_up",
            "1 while the store of limits answers, or the router has none; 0 while this process applies the "
            "limits of keys by itself.",
            registry=registry,
        )
        self.up.set(1)
        self.failures = Counter(
            "twinfang_limit_store_failures",
            "How often the store of limits went down: it failed or did not answer in time.",
            registry=registry,
        )
        self.seconds = Histogram(
            "twinfang_limit_store_seconds",
            "Time that a request waited for the store of limits.",
            buckets=CALL_S,
            registry=registry,
        )


class QuotaMetrics:
    """``of_keys`` has the figures of single keys. ``label`` returns what a key is counted as."""

    def __init__(
        self, registry: CollectorRegistry, of_keys: CollectorRegistry, label: Callable[[str], str]
    ) -> None:
        self._label = label
        self.store = StoreMetrics(registry)
        self._refusals = Counter(
            "twinfang_key_limit_refusals",
            "HTTP requests for text refused (429) because of a limit of their API key.",
            ["key", "limit"],
            registry=of_keys,
        )

    def refused(self, key_name: str, limit: str) -> None:
        self._refusals.labels(self._label(key_name), limit).inc()
