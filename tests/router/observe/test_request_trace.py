"""A client's trace in the router: it is passed to the servers, with a span for each attempt."""

import pytest

from testing.conditions import until
from testing.fleets.trace_collector import running_collector
from testing.router.scripted_servers import failing, hanging, saying
from wire.errors import TransferError

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
GIVEN = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture(scope="module")
def collector():
    with running_collector() as running:
        yield running


@pytest.fixture
async def traced(make_stack, collector):
    collector.spans.clear()
    return await make_stack(num_prefill=2, num_decode=2, otlp_endpoint=collector.http_url)


async def ask(stack, header=GIVEN, **body):
    headers = {} if header is None else {"traceparent": header}
    body = {"prompt": [5, 6, 7], "max_tokens": 2} | body
    return await stack.client.post("/v1/completions", json=body, headers=headers)


def sent(stack):
    """The ``traceparent`` of every prefill and every submission so far."""
    prefills = [request.traceparent for server in stack.prefill for request in server.requests]
    return prefills, [submit.traceparent for server in stack.decode for submit in server.submitted]


@pytest.mark.parametrize(("header", "carried"), [(GIVEN, GIVEN), ("00-nonsense", ""), (None, "")])
async def test_a_router_that_exports_nothing_carries_the_clients_trace_on(make_stack, header, carried):
    stack = await make_stack()
    stack.decode[0].script = saying([300, 301])
    assert (await ask(stack, header)).status_code == 200
    assert sent(stack) == ([carried], [carried])


async def test_each_attempt_has_its_spans_and_the_failed_one_says_with_what(traced, collector):
    traced.decode[0].script = failing(TransferError("it did not come"))
    traced.decode[1].script = saying([300, 301])
    assert (await ask(traced)).status_code == 200
    traced.services.tracing.close()
    root = next(span for span in collector.spans if span.kind == "server")
    calls = [span for span in collector.spans if span.kind == "client"]
    assert {span.trace_id for span in collector.spans} == {TRACE}
    assert {call.parent_id for call in calls} == {root.span_id}
    assert [call.attributes["twinfang.attempt"] for call in calls] == [0, 0, 1, 1]
    assert [call.is_error for call in calls] == [False, True, False, False]
    prefills, submits = sent(traced)
    told = {traceparent[36:52] for traceparent in (*prefills, *submits)}
    assert told == {call.span_id for call in calls}
    assert all(call.start_ns <= call.end_ns <= root.end_ns for call in calls)
    assert not root.is_error


async def test_a_trace_that_is_not_sampled_is_carried_on_and_not_recorded(traced, collector):
    traced.decode[0].script = traced.decode[1].script = saying([300, 301])
    assert (await ask(traced, f"{GIVEN[:-2]}00")).status_code == 200
    (prefill,), (submit,) = sent(traced)
    assert prefill == submit
    assert (prefill[3:35], prefill[-2:]) == (TRACE, "00")
    traced.services.tracing.close()
    assert not collector.spans


async def test_a_request_that_takes_too_long_and_one_whose_client_leaves(make_stack, collector):
    collector.spans.clear()
    stack = await make_stack(otlp_endpoint=collector.http_url)
    decode = stack.decode[0]
    decode.script = hanging
    stack.client.headers["X-Request-Timeout"] = "1"
    assert (await ask(stack)).status_code == 504
    stream = await stack.openai.completions.create(model="tiny", prompt=[5, 6, 7], stream=True)
    await anext(aiter(stream))
    await stream.close()
    await until(lambda: len(decode.cancelled) == 2 and not stack.gate.num_in_flight)
    stack.services.tracing.close()
    late, left = [span for span in collector.spans if span.kind == "server"]
    assert (late.is_error, late.attributes["http.response.status_code"]) == (True, 504)
    assert late.attributes["error.type"] == "deadline_exceeded"
    assert not left.is_error
    assert left.parent_id == ""
