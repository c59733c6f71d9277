"""An OpenTelemetry collector in the test's process. It receives spans by OTLP over HTTP and over gRPC."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

KINDS = {
    trace_pb2.Span.SPAN_KIND_SERVER: "server",
    trace_pb2.Span.SPAN_KIND_CLIENT: "client",
    trace_pb2.Span.SPAN_KIND_INTERNAL: "internal",
}


@dataclass(frozen=True)
class CollectedSpan:
    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    is_error: bool


@dataclass
class Collector:
    http_url: str = ""
    grpc_url: str = ""
    spans: list[CollectedSpan] = field(default_factory=list)

    def take(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        for of_resource in request.resource_spans:
            service = {a.key: a.value for a in of_resource.resource.attributes}["service.name"].string_value
            for of_scope in of_resource.scope_spans:
                self.spans += [_collected(service, span) for span in of_scope.spans]

    def trace(self, trace_id: str) -> list[CollectedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]


def _collected(service: str, span: trace_pb2.Span) -> CollectedSpan:
    def value(one: Any) -> Any:
        return getattr(one, one.WhichOneof("value"))

    return CollectedSpan(
        service,
        span.name,
        KINDS[span.kind],
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {attribute.key: value(attribute.value) for attribute in span.attributes},
        span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
    )


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            collector.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            reply = trace_service_pb2.ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            collector.take(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    rpc = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), rpc)
    collector.grpc_url = f"http://127.0.0.1:{rpc.add_insecure_port('127.0.0.1:0')}"
    collector.http_url = f"http://127.0.0.1:{http.server_port}"
    rpc.start()
    try:
        yield collector
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
        rpc.stop(None).wait()
