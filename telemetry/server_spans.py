"""Spans of a request on prefill and decode servers, made from times that the servers measure anyway."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from telemetry.span import Attributes, Span
from wire.messages.generation import PrefillReply, PrefillRequest, RequestOutput, RequestStats, Submit
from wire.messages.traceparent import is_sampled
from wire.rpc import DECODE_SERVICE, PREFILL_SERVICE

if TYPE_CHECKING:
    from telemetry.otel import Tracing

PREFILL_SPAN = f"{PREFILL_SERVICE}/Prefill"
DECODE_SPAN = f"{DECODE_SERVICE}/Stream"


class PrefillSpans:
    """The spans of one call to a prefill server."""

    def __init__(self, tracing: Tracing | None, request: PrefillRequest) -> None:
        self._tracing = tracing if is_sampled(request.traceparent) else None
        self._request = request
        self._received_s = time.monotonic()

    def ended(self, reply: PrefillReply | None, error: str = "") -> None:
        """Record the spans. ``reply`` is None if there was an error, or if the router cancelled the call."""
        if self._tracing is None:
            return
        now = time.monotonic()
        attributes: dict[str, str | int | float | bool] = {
            "twinfang.request_id": self._request.request_id,
            "twinfang.prompt_tokens": len(self._request.token_ids),
        }
        if reply is not None:
            attributes["twinfang.cached_tokens"] = reply.cached_tokens
        call = Span(
            PREFILL_SPAN, "server", self._request.traceparent, self._received_s, now, attributes, error
        )
        parent = self._tracing.record(call)
        if reply is not None:
            begun_s = max(self._received_s, now - reply.prefill_s)
            queued_s = max(self._received_s, begun_s - reply.queue_s)
            self._tracing.record(Span("queue", "internal", parent, queued_s, begun_s, {}))
            self._tracing.record(Span("prefill", "internal", parent, begun_s, now, {}))


class DecodeSpans:
    """The spans of all traced requests of a decode server. For other requests, only the flag in their
    ``traceparent`` is checked."""

    def __init__(self, tracing: Tracing | None) -> None:
        self._tracing = tracing
        self._received: dict[str, tuple[str, float]] = {}

    def received(self, request: Submit) -> None:
        if self._tracing is not None and is_sampled(request.traceparent):
            self._received[request.request_id] = request.traceparent, time.monotonic()

    def ended(self, output: RequestOutput) -> None:
        """Record the spans of a request that ends with ``output``."""
        if self._received:
            self._end(output.request_id, output.stats, output.finish_reason or "", output)

    def cancelled(self, request_id: str) -> None:
        if self._received:
            self._end(request_id, None, "cancelled", None)

    def _end(
        self, request_id: str, stats: RequestStats | None, reason: str, output: RequestOutput | None
    ) -> None:
        traced = self._received.pop(request_id, None)
        if traced is None or self._tracing is None:
            return
        traceparent, received_s = traced
        now = time.monotonic()
        error = "" if output is None or output.error is None else output.error.code
        attributes: dict[str, str | int | float | bool] = {
            "twinfang.request_id": request_id,
            "twinfang.finish_reason": reason,
        }
        if stats is not None:
            attributes["twinfang.cached_tokens"] = stats.cached_tokens
            attributes["twinfang.transfer_bytes"] = stats.transfer_bytes
        parent = self._tracing.record(
            Span(DECODE_SPAN, "server", traceparent, received_s, now, attributes, error)
        )
        for span in [] if stats is None else _parts(stats, parent, received_s, now):
            self._tracing.record(span)


def _parts(stats: RequestStats, parent: str, received_s: float, end_s: float) -> list[Span]:
    """Return the parts of a request. The time of the queue is counted from the request's start. The times of
    the other parts are counted back from its end, since a transfer may begin long after the queue has ended:
    with an early ticket, the prompt is still being computed then."""
    first_token_s = end_s - stats.decode_s
    landed_s = first_token_s - stats.first_token_s
    size: Attributes = {"twinfang.bytes": stats.transfer_bytes, "twinfang.early_bytes": stats.early_bytes}
    parts = [
        ("queue", received_s, received_s + stats.queue_s, {}),
        ("transfer", landed_s - stats.transfer_s, landed_s, size),
        ("first_token", landed_s, first_token_s, {}),
        ("decode", first_token_s, end_s, {}),
    ]
    return [
        Span(name, "internal", parent, max(received_s, start), end, attributes)
        for name, start, end, attributes in parts
        if end > start
    ]
