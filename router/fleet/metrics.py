"""Metrics of each server: its circuit breaker, its load, the policies' decisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.fleet.links.assignments import Assignments
from router.fleet.links.circuit_breaker import BreakerState
from telemetry.families.handoff import handoff_families
from telemetry.families.speculation import speculation_families
from wire.messages.generation import ServerStats

SERVER = ["role", "server"]


class ServerMetrics(Collector):
    """Shows what the router knows of its servers."""

    def __init__(self) -> None:
        self._servers: Sequence[tuple[str, str, Assignments]] = ()

    def update(self, servers: Sequence[tuple[str, str, Assignments]]) -> None:
        """Set each server's role, address and assignments. A server that is missing here is shown no
        longer."""
        self._servers = servers

    def collect(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "twinfang_circuit_breaker_state",
            "1 for the state that a server's circuit breaker is in, 0 for the others.",
            labels=[*SERVER, "state"],
        )
        opened = CounterMetricFamily(
            "twinfang_circuit_breaker_opened", "How often a circuit breaker has opened.", labels=SERVER
        )
        decisions = CounterMetricFamily(
            "twinfang_policy_decisions",
            "Attempts at a choice that were sent to a server, by the policy that chose the server.",
            labels=[*SERVER, "policy"],
        )
        assigned = GaugeMetricFamily(
            "twinfang_assigned_tokens",
            "Tokens of this router's requests at a server: being computed, or held there.",
            labels=SERVER,
        )
        queued = GaugeMetricFamily(
            "twinfang_queued_tokens",
            "Tokens that a new request would wait for, as policies see it.",
            labels=SERVER,
        )
        prefixes = GaugeMetricFamily(
            "twinfang_published_prefixes",
            "Prefixes that a server can start from, on its device or not; 0 unless a policy reads them.",
            labels=SERVER,
        )
        age = GaugeMetricFamily(
            "twinfang_server_figures_age_seconds",
            "Age of the load that a server last reported.",
            labels=SERVER,
        )
        for role, server, known in self._servers:
            if known.has_stats:
                age.add_metric([role, server], known.stats_age_s)
            prefixes.add_metric([role, server], len(known.prefixes))
            now = known.breaker.state
            for name in get_args(BreakerState):
                state.add_metric([role, server, name], float(name == now))
            opened.add_metric([role, server], known.breaker.num_opened)
            for policy, count in known.chosen_by.items():
                decisions.add_metric([role, server, policy], count)
            assigned.add_metric([role, server], known.num_tokens)
            queued.add_metric([role, server], known.load().queued_tokens)
        yield from (state, opened, decisions, assigned, queued, prefixes, age)


LABELS = ("server",)


class ServerStatsMetrics(Collector):
    """Shows stats that servers count themselves, as of the last :meth:`update`."""

    def __init__(self) -> None:
        self._prefill: Mapping[str, ServerStats] = {}
        self._decode: Mapping[str, ServerStats] = {}

    def update(self, prefill: Mapping[str, ServerStats], decode: Mapping[str, ServerStats]) -> None:
        """Set the stats by server address. A server that is missing here is shown no longer."""
        self._prefill, self._decode = prefill, decode

    def collect(self) -> Iterator[Metric]:
        yield from speculation_families(LABELS, _by_labels(self._decode))
        yield from handoff_families(LABELS, _by_labels(self._prefill) | _by_labels(self._decode))


def _by_labels(stats: Mapping[str, ServerStats]) -> dict[tuple[str, ...], ServerStats]:
    return {(address,): one for address, one in stats.items()}
