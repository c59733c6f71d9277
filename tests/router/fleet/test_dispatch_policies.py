"""Policies, sessions and circuit breakers in a running router, with scripted servers."""

from __future__ import annotations

import asyncio

import pytest

from router.fleet.links import assignments, worker_watch
from router.fleet.links import server_connection as connection
from router.fleet.links.circuit_breaker import MAX_FAILURES
from testing.conditions import until
from testing.router.scripted_router import samples_of
from testing.router.scripted_servers import failing, hanging, saying, server_stats
from wire.errors import ConfigError, InvalidRequestError, TransferError, UnavailableError
from wire.messages.prefixes import PrefixNews, TierNews, block_keys

PROMPT = [5, 6, 7, 8]


async def connected(stack):
    wanted = {"prefill": len(stack.prefill), "decode": len(stack.decode)}
    await until(lambda: stack.services.pool.num_connected() == wanted)


def breaker_of(stack, server):
    return next(
        known.breaker for _, address, known in stack.services.pool.assignments() if address == server.address
    )


async def complete(stack, num=1, **body):
    headers = body.pop("headers", None)
    for _ in range(num):
        response = await stack.client.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": PROMPT, "max_tokens": 1} | body,
            headers=headers,
        )
        assert response.status_code == 200, response.text


async def nothing_left(stack):
    await until(lambda: all(not known.num_requests for _, _, known in stack.services.pool.assignments()))
    assert all(known.num_tokens == 0 for _, _, known in stack.services.pool.assignments())


async def test_a_server_that_keeps_failing_is_left_alone_until_a_probe_succeeds(make_stack):
    stack = await make_stack(num_decode=2)
    bad, good = stack.decode
    bad.script, good.script = failing(UnavailableError("not today")), saying([50])
    await connected(stack)
    breaker = breaker_of(stack, bad)
    while breaker.state == "closed":
        await complete(stack)
    assert len(bad.submitted) == MAX_FAILURES
    await complete(stack, 4)
    assert len(bad.submitted) == MAX_FAILURES
    found = await samples_of(stack)
    assert found["twinfang_circuit_breaker_state", "decode", bad.address, "closed"] == 0
    assert found["twinfang_circuit_breaker_state", "decode", bad.address, "open"] == 1
    assert found["twinfang_circuit_breaker_opened_total", "decode", bad.address] == 1
    assert found["twinfang_circuit_breaker_state", "decode", good.address, "closed"] == 1
    breaker.retry_at = 0.0  # its time comes
    await complete(stack, 2)
    assert len(bad.submitted) == MAX_FAILURES + 1, "a probe that fails costs one attempt of one request"
    assert breaker.state == "open"
    bad.script = saying([50])
    breaker.retry_at = 0.0
    await complete(stack, 4)
    assert breaker.state == "closed"
    assert len(bad.submitted) > MAX_FAILURES + 2
    await nothing_left(stack)


def hangs_soon(monkeypatch):
    """Who was asked twice in vain hangs: an event loop that stood still for a moment makes nobody hang."""
    monkeypatch.setattr(connection, "STATS_TIMEOUT_S", 0.5)
    monkeypatch.setattr(assignments, "SILENT_S", 1.0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_server_whose_engine_hangs_gets_nothing_new_until_it_answers(make_stack, monkeypatch, role):
    hangs_soon(monkeypatch)
    monkeypatch.setattr(assignments, "HELD_OPEN_S", 2.0)
    stack = await make_stack(num_prefill=2, num_decode=2)
    for server in stack.decode:
        server.script = saying([50])
    hung, _ = getattr(stack, role)
    breaker, figures = breaker_of(stack, hung), hung.stats
    hung.stats = None
    await until(lambda: breaker.state == "open")
    before = num_sent(hung)
    await complete(stack, 4)
    assert (num_sent(hung), breaker.state) == (before, "open")
    hung.stats = figures
    await until(lambda: breaker.state == "half_open")
    await complete(stack, 4)
    assert num_sent(hung) > before
    assert breaker.state == "closed"


async def test_an_answer_of_a_decode_server_that_hangs_goes_on_at_another_one(make_stack, monkeypatch):
    hangs_soon(monkeypatch)
    stack = await make_stack(num_decode=2)
    hung, good = stack.decode
    hung.script, good.script = hanging, saying([51, 52])
    asked = asyncio.create_task(
        stack.complete(prompt=PROMPT, max_tokens=3, return_token_ids=True, ignore_eos=True)
    )
    await until(lambda: hung.submitted)
    hung.stats = None
    (choice,) = (await asked).json()["choices"]
    assert choice["token_ids"] == [50, 51, 52]
    assert good.submitted[0].num_answered == 1
    assert hung.cancelled == [hung.submitted[0].request_id]


def num_sent(server):
    return len(server.requests if server.info.role == "prefill" else server.submitted)


async def test_a_prefill_server_whose_state_can_not_be_read_is_left_alone(make_stack):
    """It answers; that its answers are worth nothing shows on the decode servers."""
    stack = await make_stack(num_prefill=2, num_decode=2)
    bad = stack.prefill[0]

    async def unless_from_bad(submit, send):
        is_bad = submit.ticket.address == bad.address
        await (failing(TransferError("out of reach")) if is_bad else saying([50]))(submit, send)

    for server in stack.decode:
        server.script = unless_from_bad
    await connected(stack)
    while breaker_of(stack, bad).state == "closed":
        await complete(stack)
    num = len(bad.requests)
    assert num == MAX_FAILURES
    await complete(stack, 4)
    assert len(bad.requests) == num
    await nothing_left(stack)


async def test_refusals_and_clients_that_leave_are_no_failures(make_stack):
    stack = await make_stack()
    decode = stack.decode[0]
    decode.script = failing(InvalidRequestError("no"))
    for _ in range(2 * MAX_FAILURES):
        assert (await stack.complete()).status_code == 400
    decode.script = hanging
    for i in range(2 * MAX_FAILURES):
        leaving = asyncio.create_task(stack.complete())
        await until(lambda i=i: len(decode.submitted) == 2 * MAX_FAILURES + i + 1)
        leaving.cancel()
    await nothing_left(stack)
    assert {known.breaker.state for _, _, known in stack.services.pool.assignments()} == {"closed"}


async def test_the_last_server_is_never_taken_away(make_stack):
    stack = await make_stack()
    decode = stack.decode[0]
    decode.script = failing(UnavailableError("not today"))
    while breaker_of(stack, decode).state == "closed":
        assert (await stack.complete()).status_code == 503
    decode.script = saying([50])
    await complete(stack)
    assert breaker_of(stack, decode).state == "closed"


async def test_requests_go_where_servers_say_that_less_is_queued(make_stack):
    stack = await make_stack(
        num_prefill=2, num_decode=2, prefill_policy="least_loaded", decode_policy="least_loaded"
    )
    busy, idle = stack.prefill
    full, empty = stack.decode
    busy.stats, idle.stats = server_stats(queued_tokens=5000), server_stats()
    full.stats = server_stats(num_blocks=100, free_blocks=5)
    empty.stats = server_stats(num_blocks=100, free_blocks=90)
    full.script = empty.script = saying([50])
    await connected(stack)
    known = {address: one for _, address, one in stack.services.pool.assignments()}
    await until(lambda: known[busy.address].load().queued_tokens == 5000)
    await until(lambda: known[full.address].load().total_tokens and known[empty.address].load().total_tokens)
    await complete(stack, 5)
    assert (len(busy.requests), len(idle.requests)) == (0, 5)
    assert (len(full.submitted), len(empty.submitted)) == (0, 5)
    found = await samples_of(stack)
    decisions = "twinfang_policy_decisions_total"
    assert found[decisions, "least_loaded", "prefill", idle.address] == 5
    assert found[decisions, "least_loaded", "decode", empty.address] == 5
    assert found["twinfang_queued_tokens", "prefill", busy.address] == 5000
    busy.stats, idle.stats = server_stats(), server_stats(queued_tokens=9000)
    await until(lambda: known[busy.address].load().queued_tokens == 0)
    await until(lambda: known[idle.address].load().queued_tokens == 9000)
    await complete(stack)
    assert len(busy.requests) == 1
    await nothing_left(stack)


async def test_requests_under_way_count_before_any_server_has_said_so(make_stack, monkeypatch):
    monkeypatch.setattr(worker_watch, "BUSY_INTERVAL_S", 0.05)
    stack = await make_stack(num_prefill=2, num_decode=2, decode_policy="least_loaded")
    for server in stack.decode:
        server.script = hanging
    await connected(stack)
    waiting = [asyncio.create_task(stack.complete(prompt=PROMPT)) for _ in range(6)]
    await until(lambda: sum(len(server.submitted) for server in stack.decode) == 6)
    assert [len(server.submitted) for server in stack.decode] == [3, 3]
    for task in waiting:
        task.cancel()
    await nothing_left(stack)


async def test_a_session_s_requests_meet_at_one_server(make_stack):
    stack = await make_stack(num_prefill=3, num_decode=3, session_header="X-User-Id")
    for server in stack.decode:
        server.script = saying([50])
    await connected(stack)
    await complete(stack, 4, headers={"x-user-id": "alice"})
    assert sorted(len(server.requests) for server in stack.prefill) == [0, 0, 4]
    assert sorted(len(server.submitted) for server in stack.decode) == [0, 0, 4]
    await complete(stack, 3)
    await complete(stack, 3, headers={"x-user-id": ""})
    assert sorted(len(server.submitted) for server in stack.decode) == [2, 2, 6]
    await next(server for server in stack.decode if len(server.submitted) == 6).stop()
    await complete(stack, 4, headers={"x-user-id": "alice"})
    assert sorted(len(server.submitted) for server in stack.decode)[:2] == [2, 6], "all at the next one"


async def test_a_session_header_has_to_be_a_header_s_name(make_stack):
    with pytest.raises(ConfigError, match="session_header 'no name'"):
        await make_stack(session_header="no name")


async def test_a_prompt_goes_where_its_prefix_is_cached(make_stack):
    stack = await make_stack(num_prefill=3, prefill_policy="prefix_affinity")
    stack.decode[0].script = saying([50])
    prompt = list(range(5, 105))
    holder = stack.prefill[1]
    keys = block_keys(prompt[:64], block_size=16, fingerprint="f", salt="")
    holder.prefixes = PrefixNews(9, True, (keys[-1],))
    await connected(stack)
    known = {address: one for _, address, one in stack.services.pool.assignments()}[holder.address]
    await until(lambda: len(known.prefixes) == 1)
    await complete(stack, 4, prompt=prompt)
    assert [len(server.requests) for server in stack.prefill] == [0, 4, 0]
    found = await samples_of(stack)
    assert found["twinfang_policy_decisions_total", "prefix_affinity", "prefill", holder.address] == 4
    assert found["twinfang_published_prefixes", "prefill", holder.address] == 1
    holder.prefixes = PrefixNews(10, False, (), (keys[-1],))
    await until(lambda: len(known.prefixes) == 0)
    await nothing_left(stack)


async def test_a_prompt_goes_where_its_prefix_is_in_host_memory_unless_a_device_has_it(make_stack):
    stack = await make_stack(num_prefill=3, prefill_policy="prefix_affinity")
    stack.decode[0].script = saying([50])
    prompt = list(range(5, 105))
    _, in_host, on_device = stack.prefill
    keys = block_keys(prompt[:64], block_size=16, fingerprint="f", salt="")
    in_host.prefixes = PrefixNews(9, True, (), (), (TierNews("host", (keys[-1],), 8.0, 0.1),))
    await connected(stack)
    known = {address: one for _, address, one in stack.services.pool.assignments()}
    await until(lambda: len(known[in_host.address].prefixes) == 1)
    await complete(stack, 3, prompt=prompt)
    assert [len(server.requests) for server in stack.prefill] == [0, 3, 0]
    on_device.prefixes = PrefixNews(9, True, (keys[-1],))
    await until(lambda: len(known[on_device.address].prefixes) == 1)
    await complete(stack, 3, prompt=prompt)
    assert [len(server.requests) for server in stack.prefill] == [0, 3, 3]
    await nothing_left(stack)
