"""The planner's last decisions as Prometheus metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from twinfang.autoscale.pool_planner import PoolSize

ROLES = ("prefill", "decode")


class AutoscaleFigures(Collector):
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.failures: Counter[str] = Counter()
        """How often a scale could not be read or changed, by role."""
        self._sizes: dict[str, tuple[PoolSize, int]] = {}
        self._clock = clock
        self._planned_s = dict.fromkeys(ROLES, clock())
        """When each pool was last planned from its load; at first, when the planner started."""

    def decided(self, role: str, size: PoolSize, num_servers: int) -> None:
        self._sizes[role] = (size, num_servers)

    def planned(self, role: str) -> None:
        """Notes that the load of a pool is known, and that its size could be read and changed."""
        self._planned_s[role] = self._clock()

    def collect(self) -> Iterator[Metric]:
        servers = GaugeMetricFamily(
            "twinfang_autoscale_servers",
            "Servers of a pool: wanted by its Deployment, serving, planned by this planner.",
            labels=["role", "kind"],
        )
        failures = CounterMetricFamily(
            "twinfang_autoscale_failures",
            "How often a pool's scale could not be read or changed.",
            labels=["role"],
        )
        for role, (size, planned) in self._sizes.items():
            for kind, num in (("wanted", size.wanted), ("serving", size.serving), ("planned", planned)):
                servers.add_metric([role, kind], num)
        age = GaugeMetricFamily(
            "twinfang_autoscale_plan_age_seconds",
            "Time since a pool was last planned from its load; at first, since start.",
            labels=["role"],
        )
        for role in ROLES:
            failures.add_metric([role], self.failures[role])
            age.add_metric([role], self._clock() - self._planned_s[role])
        yield from (servers, failures, age)
