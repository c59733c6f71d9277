"""Prometheus metrics of one router."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from router.access.key_figures import KeyFigures
from router.admission.gate_figures import GateFigures
from router.dispatch import RETRIED
from router.server_figures import ServerFigures
from router.token_figures import SHORT_S, TokenFigures
from router.told_figures import ToldFigures
from wire.errors import AbortedRequestError, CancelledRequestError, TwinfangError, all_codes
from wire.generation import PrefillReply, RequestStats

WIDE_S = (0.0001, 0.00025, 0.0005, *SHORT_S, 5.0, 10.0, 30.0)
LONG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)

Outcome = Literal["completed", "cancelled", "refused", "failed"]


class Metrics:
    """Each router has its own registry, so several can live in one process. Times in seconds."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._servers_registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "twinfang_requests",
            "HTTP requests for text by outcome: completed, cancelled, refused (4xx), failed (5xx).",
            ["outcome"],
            registry=registry,
        )
        self.request_errors = Counter(
            "twinfang_request_errors",
            "HTTP requests for text that were refused or failed, by the error's code; overloaded: the queue "
            "was full (429).",
            ["code"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "twinfang_requests_in_flight", "HTTP requests being answered, or waiting.", registry=registry
        )
        self.prompt_tokens = Counter(
            "twinfang_prompt_tokens", "Prompt tokens, once a prompt.", registry=registry
        )
        self.cached_prompt_tokens = Counter(
            "twinfang_cached_prompt_tokens", "Prompt tokens that a prefix cache held.", registry=registry
        )
        self.request_queue = Histogram(
            "twinfang_request_queue_seconds",
            "Wait in the router's queue, of requests that were let in.",
            buckets=WIDE_S,
            registry=registry,
        )
        self.time_to_first_token = Histogram(
            "twinfang_time_to_first_token_seconds",
            "From a request's arrival to a choice's first token.",
            buckets=LONG_S,
            registry=registry,
        )
        self.tokens = TokenFigures()
        registry.register(self.tokens)
        self.request_duration = Histogram(
            "twinfang_request_duration_seconds",
            "From a request's arrival to its last token.",
            buckets=LONG_S,
            registry=registry,
        )
        self.prefill_queue = Histogram(
            "twinfang_prefill_queue_seconds",
            "Wait on the prefill server before a prompt is run.",
            buckets=LONG_S,
            registry=registry,
        )
        self.prefill = Histogram(
            "twinfang_prefill_seconds",
            "Run of a prompt on the prefill server.",
            buckets=LONG_S,
            registry=registry,
        )
        self.prefill_rpc = Histogram(
            "twinfang_prefill_rpc_seconds",
            "What a call of the prefill server took beyond queue and run.",
            buckets=WIDE_S,
            registry=registry,
        )
        self.decode_queue = Histogram(
            "twinfang_decode_queue_seconds",
            "Wait for room on the decode server.",
            buckets=LONG_S,
            registry=registry,
        )
        self.transfer = Histogram(
            "twinfang_transfer_seconds",
            "Reading one prompt's blocks and state from the prefill server.",
            buckets=WIDE_S,
            registry=registry,
        )
        self.first_token = Histogram(
            "twinfang_decode_first_token_seconds",
            "From having room and state on the decode server to the first token: the recompute of a prompt's "
            "last token, or the whole prompt where nothing was handed over.",
            buckets=WIDE_S,
            registry=registry,
        )
        self.decode_rpc = Histogram(
            "twinfang_decode_rpc_seconds",
            "From a request's submission to its first token here, beyond what the decode server took.",
            buckets=WIDE_S,
            registry=registry,
        )
        self.transfer_bytes = Counter(
            "twinfang_transfer_bytes", "Bytes read from prefill servers.", registry=registry
        )
        self.transfer_descriptors = Counter(
            "twinfang_transfer_descriptors",
            "Ranges of memory that were read from prefill servers; adjacent blocks are one.",
            registry=registry,
        )
        self.retries = Counter(
            "twinfang_request_retries",
            "Further attempts at a choice that had said nothing yet, by what the last one failed with.",
            ["code"],
            registry=registry,
        )
        self.servers = Gauge(
            "twinfang_servers_connected", "Servers in use, by configured role.", ["role"], registry=registry
        )
        self.configured = Gauge(
            "twinfang_servers_configured",
            "Servers that this router is to use, by configured role.",
            ["role"],
            registry=registry,
        )
        self.unauthorized = Counter(
            "twinfang_unauthorized_requests",
            "HTTP requests without an API key that holds.",
            registry=registry,
        )
        self.gate_figures = GateFigures()
        registry.register(self.gate_figures)
        self.key_figures = KeyFigures(registry)
        self.server_figures = ServerFigures()
        registry.register(self.server_figures)
        self.told_figures = ToldFigures()
        self._servers_registry.register(self.told_figures)
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """What can be counted is shown before it has happened: the first time is a rise that a rate sees."""
        for outcome in get_args(Outcome):
            self.requests.labels(outcome)
        for code in all_codes():
            self.request_errors.labels(code)
        for code in sorted(RETRIED):
            self.retries.labels(code)

    @contextmanager
    def refusals(self, key_name: str = "") -> Iterator[None]:
        """Counts an HTTP request that ends in the block, with an error; :meth:`request` counts the others."""
        try:
            yield
        except BaseException as error:
            self._ended(key_name, error)
            raise

    @contextmanager
    def request(self, key_name: str = "") -> Iterator[None]:
        """Counts one HTTP request from here to the end of the block, under the outcome it has."""
        started, ended_by = time.monotonic(), None
        self.in_flight.inc()
        try:
            yield
            self.request_duration.observe(time.monotonic() - started)
        except BaseException as error:
            ended_by = error
            raise
        finally:
            self.in_flight.dec()
            self._ended(key_name, ended_by)

    def _ended(self, key_name: str, error: BaseException | None) -> None:
        outcome = "completed" if error is None else _outcome_of(error)
        self.requests.labels(outcome).inc()
        self.key_figures.ended(key_name, outcome)
        if outcome in ("refused", "failed"):
            code = error.code if isinstance(error, TwinfangError) else TwinfangError.code
            self.request_errors.labels(code).inc()

    def prefilled(self, reply: PrefillReply, call_s: float) -> None:
        """``call_s``: what the call took as the router saw it."""
        self.prefill_rpc.observe(max(0.0, call_s - reply.queue_s - reply.prefill_s))
        self.prefill_queue.observe(reply.queue_s)
        self.prefill.observe(reply.prefill_s)

    def decoded(self, stats: RequestStats, first_output_s: float, *, was_early: bool) -> None:
        """``first_output_s``: from the submission to the first token as the router saw it.

        Of a prompt that was submitted early it is from the prefill's reply; the queue was before that.
        """
        queue_s = 0.0 if was_early else stats.queue_s
        server_s = queue_s + stats.transfer_s + stats.first_token_s
        self.decode_rpc.observe(max(0.0, first_output_s - server_s))
        self.first_token.observe(stats.first_token_s)
        self.decode_queue.observe(stats.queue_s)
        if stats.transfer_bytes:
            self.transfer.observe(stats.transfer_s)
            self.transfer_bytes.inc(stats.transfer_bytes)
            self.transfer_descriptors.inc(stats.transfer_descriptors)

    def retried(self, code: str) -> None:
        self.retries.labels(code).inc()

    def of_router(self) -> bytes:
        """What this process has measured."""
        return generate_latest(self.registry)

    def of_servers(self) -> bytes:
        """What servers count; any router would tell the same."""
        return generate_latest(self._servers_registry)


def _outcome_of(error: BaseException) -> Outcome:
    """How a request ended that this ended."""
    if isinstance(error, AbortedRequestError):
        return "cancelled"
    if isinstance(error, TwinfangError) and not isinstance(error, CancelledRequestError):
        return "refused" if error.http_status < 500 else "failed"
    if isinstance(error, Exception) and not isinstance(error, CancelledRequestError):
        return "failed"
    return "cancelled"  # that error, a cancelled task, or the generator of a stream was closed
