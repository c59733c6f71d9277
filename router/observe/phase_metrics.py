"""How long a request spends in each phase on the servers, as one router has seen it."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry

from router.observe.token_metrics import SHORT_S
from telemetry.plain_metrics import PlainCount, PlainHistogram
from wire.messages.generation import PrefillReply, RequestStats

WIDE_S = (0.0001, 0.00025, 0.0005, *SHORT_S, 5.0, 10.0, 30.0)
LONG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)


class PhaseMetrics:
    """Metrics of prefill, of the handoff and of the time until the first token. Times are in seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(PlainCount, registry=registry)
        histogram = partial(PlainHistogram, registry=registry)
        self.prefill_queue = histogram(
            "twinfang_prefill_queue_seconds",
            "Wait on the prefill server before a prompt is run.",
            buckets=LONG_S,
        )
        self.prefill = histogram(
            "twinfang_prefill_seconds", "Run of a prompt on the prefill server.", buckets=LONG_S
        )
        self.prefill_rpc = histogram(
            "twinfang_prefill_rpc_seconds",
            "Time that a call to the prefill server took beyond queue and run.",
            buckets=WIDE_S,
        )
        self.decode_queue = histogram(
            "twinfang_decode_queue_seconds", "Wait for room on the decode server.", buckets=LONG_S
        )
        self.transfer = histogram(
            "twinfang_transfer_seconds",
            "Reading one prompt's blocks and state from the prefill server.",
            buckets=WIDE_S,
        )
        self.first_token = histogram(
            "twinfang_decode_first_token_seconds",
            "From having room and state on the decode server to the first token: the recompute of a prompt's "
            "last token, or the whole prompt where nothing was handed over.",
            buckets=WIDE_S,
        )
        self.decode_rpc = histogram(
            "twinfang_decode_rpc_seconds",
            "From a request's submission to its first token here, less the decode server's own time.",
            buckets=WIDE_S,
        )
        self.transfer_bytes = counter("twinfang_transfer_bytes", "Bytes read from prefill servers.")
        self.transfer_descriptors = counter(
            "twinfang_transfer_descriptors",
            "Ranges of memory that were read from prefill servers; adjacent blocks are one range.",
        )

    def prefilled(self, reply: PrefillReply, call_s: float) -> None:
        """Measure a prefill. ``call_s`` is the time of the call as the router saw it."""
        self.prefill_rpc.observe(max(0.0, call_s - reply.queue_s - reply.prefill_s))
        self.prefill_queue.observe(reply.queue_s)
        self.prefill.observe(reply.prefill_s)

    def decoded(self, stats: RequestStats, first_output_s: float, *, was_early: bool) -> None:
        """Measure a decode. ``first_output_s`` is the time from the submission to the first token, as the
        router saw it.

        If the prompt was submitted early (with an early ticket), ``first_output_s`` begins with the prefill
        server's reply. The wait in the decode server's queue was over by then, so it is not subtracted.
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
