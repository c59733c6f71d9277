"""When traces are exported, by which protocol, and what becomes of them if nobody takes them."""

import socket
import sys
import time

import pytest

from telemetry import otel
from telemetry.span import Span
from telemetry.tracing import start_tracing
from testing.fleets.trace_collector import running_collector
from wire.errors import ConfigError

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def start(endpoint="", **environment):
    return start_tracing("twinfang-test", "1", endpoint=endpoint, environment=environment)


@pytest.fixture(scope="module")
def collector():
    with running_collector() as running:
        yield running


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"},
        {"OTEL_TRACES_EXPORTER": "console"},
    ],
    ids=str,
)
def test_off_unless_something_asks_for_traces(environment):
    assert start(**environment) is None


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
@pytest.mark.parametrize("source", ["flag", "environment"])
def test_spans_reach_a_collector(collector, monkeypatch, protocol, source):
    url = collector.grpc_url if protocol == "grpc" else collector.http_url
    environment = {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol, "OTEL_SERVICE_NAME": f"{source}-{protocol}"}
    if source == "environment":
        environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = url
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    tracing = start(url if source == "flag" else "", **environment)
    now = time.monotonic()
    span = Span("work", "client", PARENT, now - 2, now - 1, {"number": 3}, "broken", "ab" * 8)
    child = tracing.record(span)
    tracing.record(Span("part", "internal", child, now - 2, now - 1, {}))
    tracing.record(Span("unwanted", "internal", PARENT[:-2] + "00", now - 2, now - 1, {}))
    tracing.close()
    first, second = [one for one in collector.spans if one.service == f"{source}-{protocol}"]
    assert (first.name, first.kind, first.span_id, first.parent_id) == (
        "work",
        "client",
        "ab" * 8,
        PARENT[36:52],
    )
    assert first.trace_id == second.trace_id == PARENT[3:35]
    assert (first.attributes, first.is_error, second.is_error) == ({"number": 3}, True, False)
    assert first.end_ns - first.start_ns == pytest.approx(1e9, abs=1000)
    assert abs(first.end_ns - (time.time_ns() - 1e9)) < 60e9
    assert second.parent_id == first.span_id


def test_a_root_span_takes_the_clients_parent_and_its_decision(collector):
    tracing = start(collector.http_url)
    kept = tracing.begin("request", PARENT, time.monotonic(), {})
    left = tracing.begin("request", PARENT[:-2] + "00", time.monotonic(), {})
    assert (kept.traceparent[:36], kept.traceparent[-2:]) == (PARENT[:36], "01")
    assert left.traceparent[-2:] == "00"
    for span in (kept, left):
        span.end()
    tracing.close()
    ids = {span.span_id for span in collector.spans}
    assert kept.traceparent[36:52] in ids
    assert left.traceparent[36:52] not in ids


def test_a_protocol_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="'http/json': expected http/protobuf or grpc"):
        start("http://x:4318", OTEL_EXPORTER_OTLP_PROTOCOL="http/json")


def test_without_the_sdk_a_flag_is_an_error_and_the_environment_a_warning(monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "telemetry.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"--otlp-endpoint http://x:4318: .*pip install 'twinfang\[otel\]'"):
        start("http://x:4318")
    assert start(OTEL_EXPORTER_OTLP_ENDPOINT="http://x:4318") is None
    assert "pip install" in caplog.text


def test_a_collector_that_hangs_does_not_hold_up_a_process_that_stops(monkeypatch, caplog):
    monkeypatch.setattr(otel, "FLUSH_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracing = start(f"http://127.0.0.1:{silent.getsockname()[1]}")
        now = time.monotonic()
        tracing.record(Span("work", "internal", PARENT, now, now, {}))
        tracing.close()
    assert "are lost" in caplog.text
