"""The trace of one HTTP request: the client's trace, passed on to the servers, with the router's own
spans."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import Request

from router.http.request_head import header_of
from telemetry.server_spans import DECODE_SPAN, PREFILL_SPAN
from telemetry.span import Attributes, Span
from wire.messages.traceparent import is_sampled, traceparent_of

if TYPE_CHECKING:
    from router.observe.choice_timeline import ServerCall
    from telemetry.otel import OpenSpan, Tracing

CALL_SPANS = {"prefill": PREFILL_SPAN, "decode": DECODE_SPAN}


@dataclass(frozen=True)
class RequestTrace:
    """The trace of one request. If this router exports no traces, the client's ``traceparent`` is passed to
    the servers unchanged."""

    traceparent: str = ""
    tracing: Tracing | None = None
    span: OpenSpan | None = None

    @property
    def is_recorded(self) -> bool:
        return self.span is not None and is_sampled(self.traceparent)

    def ended(
        self, queued: tuple[float, float] | None, calls: Sequence[Sequence[ServerCall]], end: TraceEnd
    ) -> None:
        """End the trace. ``queued`` has the start and the end of the request's wait; ``calls`` has one list
        of calls to servers for each choice."""
        if self.span is None or self.tracing is None:
            return
        if self.is_recorded:
            if queued is not None:
                self.tracing.record(Span("queue", "internal", self.traceparent, *queued, {}))
            for choice, its_calls in enumerate(calls):
                for call in its_calls:
                    self.tracing.record(_span_of(call, choice, self.traceparent))
        self.span.note(end.attributes | {"http.response.status_code": end.http_status})
        self.span.end(end.error if end.http_status >= 500 else "")


@dataclass(frozen=True)
class TraceEnd:
    """How the request ended."""

    http_status: int
    error: str
    attributes: dict[str, str | int | float | bool]


UNTRACED = RequestTrace()


def begin_trace(http: Request, request_id: str, tracing: Tracing | None) -> RequestTrace:
    """Continue the trace that the client's ``traceparent`` names, or begin one if traces are exported."""
    given = header_of(http.scope, b"traceparent")
    parent = "" if given is None else traceparent_of(given)
    if tracing is None:
        return RequestTrace(parent) if parent else UNTRACED
    attributes: Attributes = {
        "http.request.method": http.method,
        "http.route": http.url.path,
        "url.path": http.url.path,
        "twinfang.request_id": request_id,
    }
    arrived_s = getattr(http.state, "arrived_s", None) or time.monotonic()
    span = tracing.begin(f"{http.method} {http.url.path}", parent, arrived_s, attributes)
    return RequestTrace(span.traceparent, tracing, span)


def _span_of(call: ServerCall, choice: int, parent: str) -> Span:
    return Span(
        CALL_SPANS[call.name],
        "client",
        parent,
        call.at_s,
        call.at_s if call.end_s is None else call.end_s,
        {
            "rpc.system": "grpc",
            "twinfang.worker": call.worker,
            "twinfang.choice": choice,
            "twinfang.attempt": call.attempt,
        },
        call.error,
        call.span_id,
    )
