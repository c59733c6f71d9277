"""Metrics of refused requests, of the decode servers' drafts and of the servers' handoffs."""

import asyncio
import dataclasses
import json
import time

import httpx
import pytest

from router.fleet.links import server_connection as connection
from router.observe.metrics import MAX_KEYS, OTHER_KEYS, Metrics
from testing.conditions import until
from testing.router.scripted_router import samples_of
from testing.router.scripted_servers import hanging, saying, server_stats, silent
from wire.messages.generation import RequestOutput, RequestStats


async def told(stack):
    """Returns once the router has heard what its servers say of their load now."""
    servers = {server.address: server for server in (*stack.prefill, *stack.decode)}

    def is_heard(address, known):
        server = servers[address]
        return None in (server.server, server.stats) or known.stats == server.stats

    await until(lambda: all(is_heard(a, known) for _, a, known in stack.services.pool.assignments()))


async def counted(stack, name="twinfang_requests_total") -> dict[str, float]:
    """What a counter with one label has counted, by that label's values."""
    found = await samples_of(stack)
    return {key[1]: value for key, value in found.items() if key[0] == name and value}


async def outcomes(stack) -> dict[str, float]:
    return await counted(stack)


async def errors(stack) -> dict[str, float]:
    return await counted(stack, "twinfang_request_errors_total")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Servers of these tests send stats at once or never."""
    monkeypatch.setattr(connection, "STATS_TIMEOUT_S", 0.2)


async def test_what_has_not_happened_yet_is_shown_as_zero(make_stack):
    """A rate sees no rise in a series that begins with it."""
    found = await samples_of(await make_stack())
    for name, label in (
        ("twinfang_requests_total", "failed"),
        ("twinfang_request_errors_total", "overloaded"),
        ("twinfang_request_retries_total", "state_corrupted"),
    ):
        assert found[name, label] == 0


async def test_servers_that_are_configured_are_shown_whether_they_are_there_or_not(make_stack):
    stack = await make_stack(num_decode=2)
    await stack.decode[0].stop()
    await until(lambda: stack.services.pool.num_connected()["decode"] == 1)
    assert await counted(stack, "twinfang_servers_configured") == {"prefill": 1, "decode": 2}
    assert await counted(stack, "twinfang_servers_connected") == {"prefill": 1, "decode": 1}


# --- refused requests ------------------------------------------------------------------------------


async def endless():
    for _ in range(1000):
        yield b"x" * 10_000
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"max_tokens": 0}, 400),
        ({"max_tokens": "16"}, 400),
        ({"prompt": [5] * 500}, 400),
        ({"model": "another"}, 404),
        ({"prompt": "a" * 200_000}, 413),
    ],
    ids=str,
)
async def test_a_request_that_is_refused_is_counted_once(make_stack, body, status, stream):
    stack = await make_stack(max_body_bytes=100_000)
    stack.decode[0].script = saying([300])
    assert (await stack.complete(stream=stream, **body)).status_code == status
    assert await outcomes(stack) == {"refused": 1}
    assert (await stack.complete(stream=stream)).status_code == 200
    assert await outcomes(stack) == {"refused": 1, "completed": 1}


@pytest.mark.parametrize("content", [b"{", endless()], ids=["no JSON", "too many chunks"])
async def test_a_body_that_can_not_be_read_is_counted(make_stack, content):
    stack = await make_stack(max_body_bytes=100_000)
    headers = {"Content-Type": "application/json"}
    response = await stack.client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code in (400, 413)
    assert await outcomes(stack) == {"refused": 1}


async def test_a_429_is_counted_and_those_in_flight_are_not_touched(make_stack):
    stack = await make_stack(max_requests_in_flight=1, max_queue=0)
    decode = stack.decode[0]
    decode.script = hanging
    first = asyncio.create_task(stack.complete())
    await until(lambda: decode.submitted)
    for stream in (False, True):
        assert (await stack.complete(stream=stream)).status_code == 429
    assert await outcomes(stack) == {"refused": 2}
    assert await errors(stack) == {"overloaded": 2}
    assert await stack.metric("twinfang_requests_in_flight") == 1
    first.cancel()
    await until(lambda: stack.gate.num_in_flight == 0)
    assert await outcomes(stack) == {"refused": 2, "cancelled": 1}
    assert await errors(stack) == {"overloaded": 2}
    assert await stack.metric("twinfang_requests_in_flight") == 0


async def test_no_server_and_no_answer_in_time_are_failures(make_stack):
    stack = await make_stack(request_timeout_s=1.0)
    decode = stack.decode[0]
    decode.script = silent
    assert (await stack.complete()).status_code == 504
    await decode.stop()
    await until(lambda: stack.services.pool.not_ready_reason() is not None)
    assert (await stack.complete()).status_code == 503
    assert await outcomes(stack) == {"failed": 2}
    assert await errors(stack) == {"deadline_exceeded": 1, "no_server_available": 1}


async def test_a_client_that_leaves_while_it_sends_counts_as_cancelled(make_stack):
    stack = await make_stack()
    host, port = stack.url.removeprefix("http://").split(":")
    _reader, writer = await asyncio.open_connection(host, int(port))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: 100\r\n\r\n" + json.dumps({"prompt": "a"}).encode())
    await writer.drain()
    await asyncio.sleep(0)
    writer.close()
    await writer.wait_closed()
    labels = {"outcome": "cancelled"}
    registry = stack.services.metrics.registry
    await until(lambda: registry.get_sample_value("twinfang_requests_total", labels) == 1)
    assert await outcomes(stack) == {"cancelled": 1}


async def test_probes_and_unknown_urls_are_no_requests_for_text(make_stack):
    stack = await make_stack()
    for path in ("/healthz", "/readyz", "/v1/models", "/v1/nothing"):
        await stack.client.get(path)
    assert await outcomes(stack) == {}


# --- drafts ----------------------------------------------------------------------------------------


async def test_drafts_are_shown_for_each_decode_server(make_stack):
    stack = await make_stack(num_decode=2)
    drafting, plain = stack.decode
    drafting.stats = server_stats(drafted_by_position=(10, 8, 4), accepted_by_position=(7, 4, 1))
    plain.stats = server_stats()
    await told(stack)
    found = await samples_of(stack)
    prefix, server = "twinfang_spec_decode", drafting.address
    assert found[f"{prefix}_num_draft_tokens_total", server] == 22
    assert found[f"{prefix}_num_accepted_tokens_total", server] == 12
    for position, (tried, right) in enumerate([(10, 7), (8, 4), (4, 1)]):
        assert found[f"{prefix}_num_draft_tokens_per_pos_total", str(position), server] == tried
        assert found[f"{prefix}_num_accepted_tokens_per_pos_total", str(position), server] == right
    assert found[f"{prefix}_mean_accepted_length", server] == pytest.approx(1 + 12 / 10)
    assert found[f"{prefix}_num_draft_tokens_total", plain.address] == 0
    assert (f"{prefix}_mean_accepted_length", plain.address) not in found


async def test_a_server_that_gives_no_figures_any_more_is_shown_with_their_age(make_stack):
    stack = await make_stack(num_decode=3)
    answering, silent_one, gone = stack.decode
    silent_one.stats = server_stats(drafted_by_position=(3,), accepted_by_position=(3,))
    await told(stack)
    silent_one.stats = None
    answering.stats = server_stats(drafted_by_position=(5,), accepted_by_position=(5,))
    await gone.stop()
    await until(lambda: stack.services.pool.num_connected()["decode"] == 2)
    await told(stack)
    found = await samples_of(stack)
    name = "twinfang_spec_decode_num_draft_tokens_total"
    shown = {key[1]: value for key, value in found.items() if key[0] == name}
    assert shown == {answering.address: 5, silent_one.address: 3}
    age = {key[2]: value for key, value in found.items() if key[0] == "twinfang_server_figures_age_seconds"}
    assert age[silent_one.address] > age[answering.address]
    assert found["twinfang_servers_connected", "decode"] == 2


async def test_labels_are_called_server_and_position(make_stack):
    stack = await make_stack()
    stack.decode[0].stats = server_stats(drafted_by_position=(3,), accepted_by_position=(2,))
    await told(stack)
    response: httpx.Response = await stack.client.get("/metrics")
    address = stack.decode[0].address
    line = f'twinfang_spec_decode_num_accepted_tokens_per_pos_total{{position="0",server="{address}"}} 2.0'
    assert line in response.text.splitlines()


# --- handoffs --------------------------------------------------------------------------------------


async def test_leases_and_failed_transfers_are_shown_for_prefill_and_decode_servers(make_stack):
    stack = await make_stack()
    (prefill,), (decode,) = stack.prefill, stack.decode
    prefill.stats = server_stats(leases_held=3, leases_ended={"done": 7, "expired": 2})
    decode.stats = server_stats(
        transfers_in_flight=1,
        transfer_failures={"deadline": 4, "digest": 0},
        quarantined_blocks=12,
        quarantined_slots=5,
    )
    await told(stack)
    found = await samples_of(stack)
    assert found["twinfang_leases_held", prefill.address] == 3
    assert found["twinfang_leases_held", decode.address] == 0
    assert found["twinfang_transfers_in_flight", decode.address] == 1
    assert found["twinfang_quarantined_blocks", decode.address] == 12
    assert found["twinfang_quarantined_slots", decode.address] == 5
    text = (await stack.client.get("/metrics")).text.splitlines()
    for line in (
        f'twinfang_leases_ended_total{{reason="expired",server="{prefill.address}"}} 2.0',
        f'twinfang_transfer_failures_total{{cause="deadline",server="{decode.address}"}} 4.0',
        f'twinfang_transfer_failures_total{{cause="digest",server="{decode.address}"}} 0.0',
    ):
        assert line in text
    await prefill.stop()
    await until(lambda: stack.services.pool.num_connected()["prefill"] == 0)
    assert ("twinfang_leases_held", prefill.address) not in await samples_of(stack)


async def test_the_way_to_a_server_is_what_its_own_times_leave(make_stack):
    """Histograms of what the router sees beyond the times that servers tell."""
    stack = await make_stack()

    async def decode(submit, send):
        await asyncio.sleep(0.2)
        stats = RequestStats(queue_s=0.01, transfer_s=0.02, transfer_bytes=1, first_token_s=0.03)
        send(RequestOutput(submit.request_id, (300,), finish_reason="length", stats=stats))

    async def prefill(request):
        await asyncio.sleep(0.2)
        return dataclasses.replace(stack.prefill[0].reply(request), queue_s=0.04, prefill_s=0.05)

    stack.decode[0].script, stack.prefill[0].script = decode, prefill
    started = time.monotonic()
    assert (await stack.complete(prompt=[5, 6, 7], max_tokens=1)).status_code == 200
    seconds = time.monotonic() - started
    found = await samples_of(stack)
    assert found["twinfang_decode_first_token_seconds_sum",] == pytest.approx(0.03)
    assert 0.2 - 0.09 <= found["twinfang_prefill_rpc_seconds_sum",] <= seconds - 0.09
    assert 0.2 - 0.06 <= found["twinfang_decode_rpc_seconds_sum",] <= seconds - 0.06


def test_of_many_tenants_only_some_are_counted_one_by_one():
    metrics = Metrics(())
    for number in range(MAX_KEYS + 5):
        metrics.keys.ended(f"tenant:{number}", "completed")
    for number in range(2 * MAX_KEYS, 0, -1):
        metrics.quota.refused(f"tenant:{number}", "tokens_per_day")
    page = metrics.of_router(with_keys=True).decode()
    counted = [line for line in page.splitlines() if line.startswith("twinfang_key_limit_refusals_total{")]
    assert len(counted) == MAX_KEYS  # tenant:0 was not refused; the others are together
    assert any(f'key="{OTHER_KEYS}"' in line and line.endswith(" 1001.0") for line in counted)
