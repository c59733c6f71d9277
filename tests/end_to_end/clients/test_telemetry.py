"""Traces and metrics of a whole stack: real processes, a real OTLP receiver."""

import re
import secrets

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from testing.fleets.stack import run_async, running_stack
from testing.fleets.trace_collector import running_collector
from testing.repository import DOCS
from twinfang.autoscale.autoscaler import Autoscaler
from twinfang.autoscale.needs import Objectives
from twinfang.autoscale.pool_planner import PlannerPace, PoolLimits
from twinfang.autoscale.readings import decode_reading, prefill_reading, router_reading
from twinfang.autoscale.settings import AutoscaleConfig, PoolSource

pytestmark = pytest.mark.in_clear  # of metrics with TLS, test_tls.py shows who may read them

PROMPT = list(range(5, 305))
DOCUMENT = DOCS / "metrics.md"
CALLS = {"prefill": "twinfang.Prefill/Prefill", "decode": "twinfang.Decode/Stream"}


@pytest.fixture(scope="module")
def collector():
    with running_collector() as running:
        yield running


@pytest.fixture(scope="module")
def stack(collector):
    environment = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
    flags = ("--max-batch-tokens", "128", "--otlp-endpoint", collector.http_url)
    with running_stack("up", *flags, environment=environment) as running:
        yield running


def complete(stack, traceparent=None, **body):
    headers = {} if traceparent is None else {"traceparent": traceparent}
    body = {"model": stack.model, "prompt": PROMPT, "max_tokens": 5, "ignore_eos": True} | body
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=60.0)
    assert answer.status_code == 200, answer.text
    return answer.json()


def traceparent(*, sampled=True):
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{int(sampled):02x}"


def only(spans, **wanted):
    found = [span for span in spans if all(getattr(span, key) == value for key, value in wanted.items())]
    assert len(found) == 1, (wanted, [(span.service, span.name, span.kind) for span in spans])
    return found[0]


def children(spans, parent):
    return {span.name for span in spans if span.parent_id == parent.span_id}


def test_one_trace_holds_the_spans_of_all_three_processes(stack, collector):
    given = traceparent()
    _, trace_id, client_span, _ = given.split("-")
    answer = complete(stack, given, stream=False)
    stack.wait_until(lambda: len(collector.trace(trace_id)) >= 12, "all spans have come")
    spans = collector.trace(trace_id)
    root = only(spans, service="twinfang-router", kind="server")
    assert (root.name, root.parent_id) == ("POST /v1/completions", client_span)
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert root.attributes["gen_ai.usage.output_tokens"] == 5
    assert root.attributes["twinfang.request_id"] == answer["id"]
    for role, name in CALLS.items():
        call = only(spans, service="twinfang-router", kind="client", name=name)
        assert call.parent_id == root.span_id
        served = only(spans, service=f"twinfang-{role}", kind="server", name=name)
        assert served.parent_id == call.span_id
        parts = {"queue", "prefill"} if role == "prefill" else {"queue", "transfer", "first_token", "decode"}
        assert children(spans, served) == parts
        for part in parts:
            span = only([s for s in spans if s.parent_id == served.span_id], name=part)
            assert span.service == f"twinfang-{role}"
            assert served.start_ns <= span.start_ns <= span.end_ns <= served.end_ns
    assert not any(span.is_error for span in spans)
    transfer = only(spans, name="transfer")
    assert transfer.attributes["twinfang.bytes"] > transfer.attributes["twinfang.early_bytes"]
    order = ["transfer", "first_token", "decode"]
    assert order == [s.name for s in sorted(spans, key=lambda s: s.start_ns) if s.name in order]


def test_a_trace_that_is_not_sampled_leaves_nothing_and_one_without_a_parent_begins_here(stack, collector):
    unsampled, sampled = traceparent(sampled=False), traceparent()
    complete(stack, unsampled)
    complete(stack, "00-nonsense")
    complete(stack, sampled)
    stack.wait_until(lambda: len(collector.trace(sampled.split("-")[1])) >= 12, "the last one's have come")
    assert not collector.trace(unsampled.split("-")[1])

    def begun_here():
        return [span for span in collector.spans if span.kind == "server" and not span.parent_id]

    stack.wait_until(begun_here, "the one without a parent has come")
    assert [span.service for span in begun_here()] == ["twinfang-router"]


def test_a_request_that_fails_says_so_in_its_span(stack, collector):
    given = traceparent()
    body = {"model": stack.model, "prompt": [10**6], "max_tokens": 5}
    headers = {"traceparent": given, "X-Request-Id": "the-clients-own"}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=60.0)
    assert (answer.status_code, answer.headers["x-request-id"]) == (400, "the-clients-own")
    assert not collector.trace(given.split("-")[1])  # refused before it was one to trace


# --- metrics ---------------------------------------------------------------------------------------


def families(url):
    return {
        family.name: family for family in text_string_to_metric_families(httpx.get(url, timeout=60.0).text)
    }


def documented():
    """Names of the document's tables by the process of the heading above each."""
    found, names = {}, set()
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## (.*)$", line):
            names = found.setdefault(heading[1], set())
        elif row := re.match(r"\| `(twinfang_\w+)", line):
            names.add(row[1].removesuffix("_total"))
    return found


def test_every_process_shows_what_the_document_says_and_nothing_else(stack):
    complete(stack)
    processes = stack.processes()

    def shown(name):
        names = families(processes[name].metrics_url)
        return {one for one in names if one.startswith("twinfang_") and not one.endswith("_created")}

    table = documented()
    assert shown("router") == table["Router"]
    assert shown("prefill-0") == shown("decode-0") == table["Servers"]


def expected_gains():
    """Of each server's counters, by one answer of six tokens to a prompt of 301."""

    def gain(count, family, sample, **labels):
        return f"twinfang_{family}", f"twinfang_{family}_{sample}", labels, count

    for_both = [
        gain(1, "request_queue_seconds", "count"),
        gain(301, "prefix_cache_queries", "total"),
    ]
    return {
        "prefill-0": [
            *for_both,
            gain(1, "prefill_seconds", "count"),
            gain(1, "requests_ended", "total", reason="prefilled"),
            gain(3, "steps", "total", kind="prefill"),
        ],
        "decode-0": [
            *for_both,
            gain(1, "requests_ended", "total", reason="length"),
            gain(6, "generation_tokens", "total"),
            gain(6, "steps", "total", kind="decode"),
            gain(1, "time_to_first_token_seconds", "count"),
            gain(5, "inter_token_latency_seconds", "count"),
            gain(1, "transfer_seconds", "count"),
        ],
    }


def test_servers_count_what_they_did(stack):
    """Their pages may show values that are a moment old."""
    pages = {name: one.metrics_url for name, one in stack.processes().items() if name != "router"}
    stack.wait_until(stack.is_idle, "earlier requests are over")
    before = {name: families(url) for name, url in pages.items()}
    complete(stack, max_tokens=6, prompt=[7, *PROMPT])
    stack.wait_until(lambda: stack.stats("prefill-0")["prefill-0"].leases_held == 0, "the lease is over")

    def value(page, family, sample, labels):
        samples = page[family].samples
        return sum(s.value for s in samples if s.name == sample and labels.items() <= s.labels.items())

    def gains(name):
        after = families(pages[name])
        return [
            (*which, value(after, *which) - value(before[name], *which))
            for *which, _ in expected_gains()[name]
        ]

    for name, expected in expected_gains().items():
        stack.wait_until(lambda name=name, expected=expected: gains(name) == expected, f"{name} counts it")
        url = pages[name].replace("/metrics", "/readyz")
        assert httpx.get(url, timeout=60.0).text == "ready\n"


def test_a_planner_finds_on_real_pages_what_it_reads(stack):
    urls = {name: (process.metrics_url,) for name, process in stack.processes().items()}
    limits, said = PoolLimits(1, 4), []
    config = AutoscaleConfig(
        urls["router"],
        PoolSource("prefill", urls["prefill-0"], limits),
        PoolSource("decode", urls["decode-0"], limits),
        Objectives(5.0, 1.0, 5.0),
        PlannerPace(60.0, 300.0),
    )
    planner = Autoscaler(config, say=said.append)
    stack.wait_until(stack.is_idle, "earlier requests are over")
    run_async(planner.look)
    for i in range(3):
        complete(stack, prompt=[11 + i, *PROMPT], max_tokens=6)
    stack.wait_until(stack.is_idle, "these are over, too")
    run_async(planner.look)
    prefill = prefill_reading(planner.prefill.window)
    assert (prefill.num_servers, prefill.service.count) == (1, 3)
    assert 0 < prefill.busy_servers <= 1
    assert 0 < prefill.prompt_s < 5
    decode = decode_reading(planner.decode.window)
    assert (decode.num_servers, decode.batch_rows, decode.queue.count) == (1, 1.0, 3)
    assert decode.max_rows == 64
    assert 0 <= decode.used_blocks < 1
    routers = router_reading(planner.routers)
    assert (routers.ttft.count, routers.queue.count) == (3, 3)
    # Where a router is kept waiting, a choice's first tokens come together: no time lies between them.
    assert 0 < routers.tpot.count <= 15
    assert routers.later_s < routers.ttft.mean
    assert [line.partition(":")[0] for line in said] == ["prefill stays at 1", "decode stays at 1"] * 2
    assert said[2].endswith("servers busy; that is enough for now")
