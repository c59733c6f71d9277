"""Prometheus metrics of one router."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest

from router.admission.metrics import GateMetrics
from router.fleet.metrics import ServerMetrics, ServerStatsMetrics
from router.observe.phase_metrics import LONG_S, WIDE_S, PhaseMetrics
from router.observe.token_metrics import TokenMetrics
from router.quota.metrics import QuotaMetrics
from telemetry.plain_metrics import LabelledHistogram, PlainCount, PlainCounter, PlainGauge, PlainHistogram
from wire.errors import AbortedRequestError, CancelledRequestError, TwinfangError, all_codes

MAX_KEYS = 1000
"""How many keys are counted one by one. An issuer of tokens may know more tenants than a page can list."""
OTHER_KEYS = "other:keys"
"""What all further keys are counted as. Names of keys and tenants are different from it."""


class KeyMetrics:
    """Requests and tokens of each API key. In a router without keys, the key's name is empty, and nothing is
    counted."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = PlainCounter(
            "twinfang_key_requests",
            "HTTP requests for text by API key and outcome, as twinfang_requests.",
            ["key", "outcome"],
            registry=registry,
        )
        self._tokens = PlainCounter(
            "twinfang_key_tokens",
            "Tokens by API key and kind: prompt (each prompt once), cached (the part of prompt that a prefix "
            "cache held), generation, reasoning (the part of generation that is thinking). Requests that "
            "were let in count, however they ended.",
            ["key", "kind"],
            registry=registry,
        )

        self._names: set[str] = set()

    def label(self, key_name: str) -> str:
        """Return what a key is counted as: its name, or :data:`OTHER_KEYS` if there are too many."""
        if key_name not in self._names:
            if len(self._names) >= MAX_KEYS:
                return OTHER_KEYS
            self._names.add(key_name)
        return key_name

    def ended(self, key_name: str, outcome: str) -> None:
        if key_name:
            self._requests.labels(self.label(key_name), outcome).inc()

    def used(self, key_name: str, *, prompt: int, cached: int, generation: int, reasoning: int) -> None:
        if key_name:
            key_name = self.label(key_name)
            self._tokens.labels(key_name, "prompt").inc(prompt)
            self._tokens.labels(key_name, "cached").inc(cached)
            self._tokens.labels(key_name, "generation").inc(generation)
            self._tokens.labels(key_name, "reasoning").inc(reasoning)

    def usage(self) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
        """Return what was counted for each key: its requests by outcome, its tokens by kind."""
        found: dict[str, tuple[dict[str, int], dict[str, int]]] = {}
        for place, counter in enumerate((self._requests, self._tokens)):
            for sample in (sample for metric in counter.collect() for sample in metric.samples):
                if sample.name.endswith("_total"):
                    key, kind = sample.labels["key"], sample.labels["outcome" if place == 0 else "kind"]
                    found.setdefault(key, ({}, {}))[place][kind] = int(sample.value)
        return found


Outcome = Literal["completed", "cancelled", "refused", "failed"]


class Metrics:
    """Metrics of one router. Each object has its own registry, so one process can have several objects. Times
    are in seconds."""

    def __init__(self, retried_codes: Iterable[str], model_names: Iterable[str] = ()) -> None:
        registry = self.registry = CollectorRegistry()
        self._servers_registry = CollectorRegistry()
        count, counter = partial(PlainCount, registry=registry), partial(PlainCounter, registry=registry)
        gauge, histogram = partial(Gauge, registry=registry), partial(PlainHistogram, registry=registry)
        ProcessCollector(registry=registry)
        self.requests = counter(
            "twinfang_requests",
            "HTTP requests for text by outcome: completed, cancelled, refused (4xx), failed (5xx).",
            ["outcome"],
        )
        self.request_errors = counter(
            "twinfang_request_errors",
            "HTTP requests for text that were refused or failed, by the error's code; overloaded: the queue "
            "was full (429).",
            ["code"],
        )
        self.in_flight = PlainGauge(
            "twinfang_requests_in_flight", "HTTP requests being answered, or waiting.", registry=registry
        )
        self.prompt_tokens = count("twinfang_prompt_tokens", "Prompt tokens; each prompt counts once.")
        self.cached_prompt_tokens = count(
            "twinfang_cached_prompt_tokens", "Prompt tokens that a prefix cache held."
        )
        self.request_queue = LabelledHistogram(
            "twinfang_request_queue_seconds",
            "Wait in the router's queue, of requests that were let in.",
            ["model"],
            buckets=WIDE_S,
            registry=registry,
        )
        self.time_to_first_token = histogram(
            "twinfang_time_to_first_token_seconds",
            "From a request's arrival to a choice's first token.",
            buckets=LONG_S,
        )
        self.tokens = TokenMetrics()
        registry.register(self.tokens)
        self.request_duration = histogram(
            "twinfang_request_duration_seconds", "From a request's arrival to its last token.", buckets=LONG_S
        )
        self.phases = PhaseMetrics(registry)
        self.retries = counter(
            "twinfang_request_retries",
            "Further attempts at a choice without any token yet, by the error of the attempt before.",
            ["code"],
        )
        self.servers = gauge("twinfang_servers_connected", "Servers in use, by configured role.", ["role"])
        self.configured = gauge(
            "twinfang_servers_configured", "Servers that this router is to use, by configured role.", ["role"]
        )
        self.unauthorized = count("twinfang_unauthorized_requests", "HTTP requests without a valid API key.")
        self.gates = GateMetrics()
        registry.register(self.gates)
        self.of_keys = CollectorRegistry()
        """The figures of keys. Only who has a role may read the keys' names."""
        self.keys = KeyMetrics(self.of_keys)
        self.quota = QuotaMetrics(registry, self.of_keys, self.keys.label)
        self.router_view = ServerMetrics()
        registry.register(self.router_view)
        self.server_stats = ServerStatsMetrics()
        self._servers_registry.register(self.server_stats)
        self._begin_at_zero(retried_codes, model_names)

    def _begin_at_zero(self, retried_codes: Iterable[str], model_names: Iterable[str]) -> None:
        """Show counters at 0 before anything was counted. Otherwise a rate in Prometheus would miss the first
        count."""
        for outcome in get_args(Outcome):
            self.requests.labels(outcome)
        for code in all_codes():
            self.request_errors.labels(code)
        for code in sorted(retried_codes):
            self.retries.labels(code)
        for name in model_names:
            self.request_queue.labels(name)

    def began(self) -> float:
        """Count an HTTP request as in flight. Return the time at which it began, for :meth:`ended`."""
        self.in_flight.inc()
        return time.monotonic()

    def ended(self, key_name: str, began_s: float, error: BaseException | None) -> None:
        """Count an HTTP request that :meth:`began` has counted, under its outcome."""
        self.in_flight.inc(-1)
        if error is None:
            self.request_duration.observe(time.monotonic() - began_s)
        self._count(key_name, error)

    def refused(self, key_name: str, error: BaseException) -> None:
        """Count an HTTP request that ended before :meth:`began` was called for it."""
        self._count(key_name, error)

    def _count(self, key_name: str, error: BaseException | None) -> None:
        outcome = "completed" if error is None else _outcome_of(error)
        self.requests.labels(outcome).inc()
        self.keys.ended(key_name, outcome)
        if outcome in ("refused", "failed"):
            code = error.code if isinstance(error, TwinfangError) else TwinfangError.code
            self.request_errors.labels(code).inc()

    def retried(self, code: str) -> None:
        self.retries.labels(code).inc()

    def of_router(self, *, with_keys: bool) -> bytes:
        """Return the metrics that this process has measured, with or without those of single keys."""
        return generate_latest(self.registry) + (generate_latest(self.of_keys) if with_keys else b"")

    def of_servers(self) -> bytes:
        """Return the metrics that servers count. Every router would return the same values."""
        return generate_latest(self._servers_registry)


def _outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of a request that ended with ``error``."""
    if isinstance(error, AbortedRequestError):
        return "cancelled"
    if isinstance(error, TwinfangError) and not isinstance(error, CancelledRequestError):
        return "refused" if error.http_status < 500 else "failed"
    if isinstance(error, Exception) and not isinstance(error, CancelledRequestError):
        return "failed"
    return "cancelled"  # CancelledRequestError, a cancelled task, or a closed generator of a stream
