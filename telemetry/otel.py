"""The OpenTelemetry SDK as this project uses it. Imported only by processes that export traces."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import secrets
import threading
import time

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace import Span as OtelSpan

from telemetry.span import Attributes, Span
from wire.messages.traceparent import is_sampled, with_span

log = logging.getLogger(__name__)

FLUSH_S = 2.0
"""Maximum time for sending the last spans when a process stops, even if the collector does not answer."""
TRACES_PATH = "/v1/traces"
CLOCK_WAS_SET_NS = 1_000_000

_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}


class OpenSpan:
    """A span that is not over yet and may have children."""

    def __init__(self, span: OtelSpan) -> None:
        self._span = span
        context = span.get_span_context()
        flags = int(context.trace_flags) & 1
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"

    def note(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def end(self, error: str = "") -> None:
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class Tracing:
    """Makes spans and gives them to the exporter's thread. Use it only on the event loop's thread."""

    def __init__(self, service: str, instance_id: str, exporter: SpanExporter) -> None:
        version = importlib.metadata.version("twinfang")
        self._ids = _ChosenIds()
        self._epoch = _Epoch()
        self._provider = TracerProvider(
            resource=_resource(service, instance_id, version), id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("twinfang", version)

    def begin(self, name: str, parent: str, start_s: float, attributes: Attributes) -> OpenSpan:
        """Begin the span of a request that has arrived. The sampler (OTEL_TRACES_SAMPLER) decides whether its
        trace is recorded.

        ``parent``: the client's ``traceparent``, or empty.
        """
        context = _context_of(parent) if parent else Context()
        start_ns = self._epoch.ns(start_s)
        return OpenSpan(
            self._tracer.start_span(name, context, SpanKind.SERVER, dict(attributes), start_time=start_ns)
        )

    def record(self, span: Span) -> str:
        """Record a span that is over, if its trace is recorded. Return the ``traceparent`` that the span's
        children use."""
        if not is_sampled(span.parent):
            return span.parent
        span_id = span.span_id or secrets.token_hex(8)
        self._ids.next_span_id = int(span_id, 16)
        recorded = self._tracer.start_span(
            span.name,
            _context_of(span.parent),
            _KINDS[span.kind],
            dict(span.attributes),
            start_time=self._epoch.ns(span.start_s),
        )
        if span.error:
            recorded.set_status(Status(StatusCode.ERROR, span.error))
        recorded.end(self._epoch.ns(span.end_s))
        return with_span(span.parent, span_id)

    def close(self) -> None:
        """Send the spans that are left, for at most ``FLUSH_S``. Blocks."""
        flush = threading.Thread(target=self._provider.force_flush, name="flush", daemon=True)
        flush.start()
        flush.join(FLUSH_S)
        if flush.is_alive():
            log.warning("the collector did not take the last spans within %g s: they are lost", FLUSH_S)


def make_exporter(protocol: str, endpoint: str | None) -> SpanExporter:
    """Make an exporter to ``endpoint``, a collector's base URL. None: the URL in the OTEL_EXPORTER_OTLP_*
    variables."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=None if endpoint is None else endpoint.rstrip("/") + TRACES_PATH)


class _ChosenIds(RandomIdGenerator):
    """Gives the next span an id that was already sent to another process."""

    def __init__(self) -> None:
        self.next_span_id = 0

    def generate_span_id(self) -> int:
        chosen, self.next_span_id = self.next_span_id, 0
        return chosen or super().generate_span_id()


class _Epoch:
    """The system time at which the monotonic clock was 0. It changes only if the system's clock was set, so
    that spans recorded one after the other have a common time base."""

    def __init__(self) -> None:
        self._zero_ns = 0

    def ns(self, at_s: float) -> int:
        """Return the nanoseconds since 1970 at a time of the monotonic clock."""
        now_ns = time.time_ns() - time.monotonic_ns()
        if abs(now_ns - self._zero_ns) > CLOCK_WAS_SET_NS:
            self._zero_ns = now_ns
        return self._zero_ns + int(at_s * 1e9)


def _context_of(traceparent: str) -> Context:
    _, trace_id, span_id, flags = traceparent.split("-")
    parent = SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16))
    )
    return set_span_in_context(NonRecordingSpan(parent), Context())


def _resource(service: str, instance_id: str, version: str) -> Resource:
    """Describe the service. A name in the OTEL_* variables is used instead of ``service``."""
    names = {SERVICE_INSTANCE_ID: instance_id, SERVICE_VERSION: version}
    is_named = "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not is_named and not os.environ.get("OTEL_SERVICE_NAME"):
        names[SERVICE_NAME] = service
    return Resource.create(names)
