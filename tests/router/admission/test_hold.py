"""While no server can serve but one is expected back, new requests and running answers wait for it."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from router.fleet.links import server_connection as connection
from router.fleet.links import worker_watch
from testing.conditions import TIMEOUT_S, until
from testing.router.scripted_router import MODEL, events_of
from testing.router.scripted_servers import saying, silent
from wire.messages.generation import ErrorReply, RequestOutput

PROMPT = [5, 6, 7, 8]
LONG, SHORT = TIMEOUT_S, 0.3
ROLES = ("prefill", "decode")


def only(stack, role):
    return {"prefill": stack.prefill, "decode": stack.decode}[role][0]


def state(stack):
    """Requests that wait in the queue, and answers under way that wait for a server."""
    return stack.gate.num_held, stack.services.models.find(MODEL).hold.num_waiting


async def lose(stack, *roles):
    """Kills the servers of these roles; returns once the router knows."""
    for role in roles:
        await only(stack, role).stop()
    await until(lambda: not any(stack.services.pool.num_connected()[role] for role in roles))


async def bring_back(server, life=2, **changes):
    """Another life of the server at its address."""
    server.info = dataclasses.replace(
        server.info, incarnation=f"{server.info.role}-{server.info.fingerprint}-{life}", **changes
    )
    await server.start()


def answering(num_tokens):
    """A script that sends tokens from 50 on, and continues after those that exist already; it breaks off
    after two."""

    async def script(submit, send):
        done = submit.num_answered
        if done:
            await saying([50 + i for i in range(done, num_tokens)])(submit, send)
        else:
            send(RequestOutput(submit.request_id, (50, 51)))

    return script


async def begin(stack, num_tokens=6, **body):
    """A streamed answer of which two tokens have come; the request's end as a task."""
    only(stack, "decode").script = answering(num_tokens)
    started = asyncio.Event()
    answer = asyncio.create_task(
        events_of(stack, started, prompt=PROMPT, max_tokens=num_tokens, return_token_ids=True, **body)
    )
    await started.wait()
    return answer


def tokens_of(events):
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"] or ()]


@pytest.mark.parametrize("gone", [("prefill",), ("decode",), ROLES])
async def test_requests_wait_for_the_only_server_of_a_role(make_stack, gone):
    stack = await make_stack(hold_s=LONG)
    stack.decode[0].script = saying([50, 51])
    assert (await stack.client.get("/readyz")).status_code == 200
    await lose(stack, *gone)
    waiting = [asyncio.create_task(stack.complete(prompt=PROMPT, stream=i % 2 == 0)) for i in range(4)]
    await until(lambda: state(stack) == (4, 0))
    text = (await stack.client.get("/metrics")).text
    assert f'twinfang_requests_held{{model="{MODEL}"}} 4.0' in text
    assert (await stack.client.get("/readyz")).status_code == 200, "clients are best off waiting here"
    for role in gone:
        await bring_back(only(stack, role))
    assert [one.status_code for one in await asyncio.gather(*waiting)] == [200] * 4
    assert state(stack) == (0, 0)


async def test_an_answer_under_way_is_taken_up_by_the_server_that_returns(make_stack):
    stack = await make_stack(hold_s=LONG)
    answer = await begin(stack)
    await lose(stack, "decode")
    await until(lambda: state(stack) == (0, 1))
    assert f'twinfang_choices_held{{model="{MODEL}"}} 1.0' in (await stack.client.get("/metrics")).text
    await bring_back(stack.decode[0])
    assert tokens_of(await answer) == [50, 51, 52, 53, 54, 55]
    first, second = stack.decode[0].submitted
    assert second.token_ids == (*first.token_ids, 50, 51)
    assert len(stack.prefill[0].requests) == 2, "prompt and answer so far are prefilled once more"


async def test_a_prompt_whose_server_dies_in_the_midst_of_it_is_computed_by_its_next_life(make_stack):
    stack = await make_stack(hold_s=LONG)
    prefill = stack.prefill[0]
    stack.decode[0].script = saying([50])

    async def never(request):
        await asyncio.Event().wait()

    prefill.script = never
    asked = asyncio.create_task(stack.complete(prompt=PROMPT))
    await until(lambda: prefill.requests)
    await lose(stack, "prefill")
    await until(lambda: state(stack) == (0, 1))
    prefill.script = None
    await bring_back(prefill)
    assert (await asked).status_code == 200
    assert [len(prefill.requests), len(stack.decode[0].submitted)] == [2, 1]


@pytest.mark.parametrize("gone", [("decode",), ROLES])
async def test_an_early_submission_that_is_lost_is_made_again(make_stack, gone):
    stack = await make_stack(hold_s=LONG)
    prefill, decode = stack.prefill[0], stack.decode[0]
    prefill.starts_early = True
    may_reply = asyncio.Event()

    async def slow(request):
        await may_reply.wait()
        return prefill.reply(request)

    prefill.script = slow
    asked = asyncio.create_task(stack.complete(prompt=PROMPT))
    await until(lambda: decode.submitted)
    await lose(stack, *gone)
    may_reply.set()
    await until(lambda: state(stack) == (0, 1))
    decode.script = saying([50])
    for role in gone:
        await bring_back(only(stack, role))
    assert (await asked).status_code == 200


async def test_waiting_costs_no_attempt(make_stack):
    """Two lives of the server fail the answer without a token in between; a third attempt is left."""
    stack = await make_stack(hold_s=LONG)
    answer = await begin(stack)
    for life in range(2, 4):
        await lose(stack, "decode")
        await until(lambda: state(stack) == (0, 1))
        stack.decode[0].script = silent if life == 2 else answering(6)
        await bring_back(stack.decode[0], life)
        await until(lambda life=life: len(stack.decode[0].submitted) == life)
    assert tokens_of(await answer) == [50, 51, 52, 53, 54, 55]


async def test_servers_of_another_fingerprint_serve_new_requests_and_take_up_no_answer(make_stack):
    stack = await make_stack(hold_s=LONG)
    answer = await begin(stack)
    await lose(stack, *ROLES)
    for role in ROLES:
        await bring_back(only(stack, role), fingerprint="another")
    stack.decode[0].script = saying([60])
    assert (await stack.complete(prompt=PROMPT)).status_code == 200
    await until(lambda: state(stack) == (0, 1), "the answer has found no server that may take it up")
    assert all(not submit.num_answered for submit in stack.decode[0].submitted)
    await lose(stack, *ROLES)
    stack.decode[0].script = answering(6)
    for role in ROLES:
        await bring_back(only(stack, role), life=3, fingerprint="f")
    assert tokens_of(await answer) == [50, 51, 52, 53, 54, 55]


async def test_a_wait_for_a_fingerprint_that_does_not_return_ends_with_an_error(make_stack):
    stack = await make_stack(hold_s=SHORT)
    answer = await begin(stack)
    await lose(stack, *ROLES)
    for role in ROLES:
        await bring_back(only(stack, role), fingerprint="another")
    *said, last = await answer
    assert tokens_of(said) == [50, 51]
    assert last["error"]["code"] == "no_server_available"
    assert state(stack) == (0, 0)


async def test_a_wait_ends_with_a_503_after_its_time(make_stack):
    stack = await make_stack(hold_s=SHORT)
    answer = await begin(stack)
    await lose(stack, "decode")
    refused = await stack.complete(prompt=PROMPT)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert (await answer)[-1]["error"]["code"] == "no_server_available"
    assert (await stack.client.get("/readyz")).status_code == 503
    await bring_back(stack.decode[0])
    await until(lambda: stack.services.pool.not_ready_reason() is None)
    assert (await stack.client.get("/readyz")).status_code == 200


@pytest.mark.parametrize("role", ROLES)
async def test_nobody_waits_for_servers_that_were_removed(make_stack, role):
    stack = await make_stack(hold_s=LONG)
    answer = await begin(stack)
    await lose(stack, role, "decode")
    waiting = asyncio.create_task(stack.complete(prompt=PROMPT))
    await until(lambda: state(stack) == (1, 1))
    pool = stack.services.pool
    pool.remove(next(one for one in pool.workers() if one.pool_role == role))
    assert (await waiting).status_code == 503
    assert (await answer)[-1]["error"]["code"] == "no_server_available"
    assert (await stack.complete(prompt=PROMPT)).status_code == 503
    assert (await stack.client.get("/readyz")).status_code == 503


async def test_nobody_waits_for_a_role_that_was_never_there(make_stack):
    stack = await make_stack(num_prefill=0, ready=False, hold_s=LONG)
    await until(lambda: stack.services.pool.num_connected()["decode"] == 1)
    assert (await stack.complete(prompt=PROMPT)).status_code == 503


@pytest.mark.parametrize("role", ROLES)
async def test_nobody_waits_for_servers_that_drain(make_stack, role):
    stack = await make_stack(hold_s=LONG)
    worker = next(one for one in stack.services.pool.workers() if one.pool_role == role)
    worker.drain.wish(True)
    assert (await stack.complete(prompt=PROMPT)).status_code == 503
    await lose(stack, role)
    assert (await stack.complete(prompt=PROMPT)).status_code == 503
    assert (await stack.client.get("/readyz")).status_code == 503


async def test_a_client_that_leaves_while_it_waits_is_forgotten(make_stack):
    stack = await make_stack(hold_s=LONG)
    answer = await begin(stack)
    await lose(stack, "decode")
    waiting = asyncio.create_task(stack.complete(prompt=PROMPT))
    await until(lambda: state(stack) == (1, 1))
    waiting.cancel()
    answer.cancel()
    await until(lambda: (state(stack), stack.gate.num_in_flight) == ((0, 0), 0))


async def test_a_request_s_own_deadline_ends_its_wait(make_stack):
    stack = await make_stack(hold_s=LONG, request_timeout_s=1.0)
    answer = await begin(stack)
    await lose(stack, "decode")
    assert (await stack.complete(prompt=PROMPT)).status_code == 504
    assert (await answer)[-1]["error"]["code"] == "deadline_exceeded"
    assert state(stack) == (0, 0)


async def test_the_queue_s_limit_holds_for_those_that_wait_for_servers(make_stack):
    stack = await make_stack(hold_s=LONG, max_queue=2)
    stack.decode[0].script = saying([50])
    assert (await stack.complete(prompt=PROMPT)).status_code == 200
    await lose(stack, "decode")
    waiting = [asyncio.create_task(stack.complete(prompt=PROMPT)) for _ in range(2)]
    await until(lambda: state(stack) == (2, 0))
    assert (await stack.complete(prompt=PROMPT)).status_code == 429
    await bring_back(stack.decode[0])
    assert [one.status_code for one in await asyncio.gather(*waiting)] == [200, 200]


async def test_requests_wait_for_the_first_server_ever(make_stack):
    """Nothing can be checked before it has said what it takes."""
    stack = await make_stack(hold_s=LONG, ready=False)
    await lose(stack, *ROLES)
    for worker in stack.services.pool.workers():  # as if they had never been there
        worker._connection.last_info = None
    stack.services.pool.models[MODEL]._limits = None
    waiting = [
        asyncio.create_task(stack.complete(prompt=PROMPT)),
        asyncio.create_task(stack.chat()),
        asyncio.create_task(stack.complete(prompt=PROMPT)),
    ]
    await until(lambda: state(stack) == (3, 0))
    waiting.pop().cancel()
    await until(lambda: state(stack) == (2, 0))
    stack.decode[0].script = saying([50])
    for role in ROLES:
        await bring_back(only(stack, role))
    assert [one.status_code for one in await asyncio.gather(*waiting)] == [200, 200]


async def test_readyz_is_503_before_the_first_server_is_there(make_stack):
    stack = await make_stack(num_prefill=0, ready=False, hold_s=LONG)
    assert (await stack.client.get("/readyz")).status_code == 503


@pytest.mark.parametrize("changes", [{"role": "both"}, {"local_prefill": True}])
async def test_a_server_that_computes_prompts_itself_is_waited_for_and_needs_no_other(make_stack, changes):
    stack = await make_stack(hold_s=LONG)
    decode = stack.decode[0]
    await lose(stack, *ROLES)
    decode.script = saying([50])
    await bring_back(decode, **changes)
    await until(lambda: stack.services.pool.not_ready_reason() is None)
    assert (await stack.complete(prompt=PROMPT)).status_code == 200
    await lose(stack, "decode")
    waiting = asyncio.create_task(stack.complete(prompt=PROMPT))
    await until(lambda: state(stack) == (1, 0))
    await bring_back(decode, life=3)
    assert (await waiting).status_code == 200
    assert [submit.ticket for submit in decode.submitted] == [None, None]


async def test_those_that_wait_are_told_before_a_router_s_grace_is_over(make_stack):
    stack = await make_stack(hold_s=LONG, shutdown_grace_s=1.2)
    answer = await begin(stack)
    await lose(stack, "decode")
    waiting = asyncio.create_task(stack.complete(prompt=PROMPT))
    await until(lambda: state(stack) == (1, 1))
    stack.app.state.drain.begin()
    assert (await waiting).status_code == 503
    assert (await answer)[-1]["error"]["code"] == "no_server_available"


async def test_how_long_requests_wait_can_be_changed(make_stack):
    stack = await make_stack(hold_s=LONG)
    await lose(stack, "decode")
    waiting = asyncio.create_task(stack.complete(prompt=PROMPT))
    await until(lambda: state(stack) == (1, 0))
    stack.services.settings.change({"hold_s": 0.0})
    assert (await waiting).status_code == 503
    assert (await stack.complete(prompt=PROMPT)).status_code == 503


# --- servers that are frozen


@pytest.mark.parametrize("late", ["frozen", "starting"])
async def test_an_answer_that_moves_waits_for_a_server_that_is_only_late(make_stack, monkeypatch, late):
    """A server gives its answers away while the only other one does not answer, as on a machine that is too
    busy to run it, or is not up yet, as in a rollout that does not wait."""
    stack = await make_stack(num_decode=2, has_health=True, hold_s=LONG)
    pool, (stopping, other) = stack.services.pool, stack.decode
    link = next(one for one in pool._decode if one.address == other.address)
    if late == "frozen":
        monkeypatch.setattr(connection, "DESCRIBE_TIMEOUT_S", SHORT)
        other.freeze()
    else:
        await other.stop()
        link._connection.last_info = None  # as if it had never been there
    await until(lambda: link.info is None)
    monkeypatch.setattr(connection, "DESCRIBE_TIMEOUT_S", TIMEOUT_S)
    other.script = answering(6)
    answer = await begin(stack)
    await stopping.health.set("stopping")
    await until(lambda: pool.num_connected()["decode"] == 0)
    (first,) = stopping.submitted
    stopping.send(RequestOutput(first.request_id, (), finish_reason="moved", ticket=first.ticket))
    await until(lambda: state(stack) == (0, 1))
    if late == "frozen":
        other.thaw()
    else:
        await other.start()
    assert tokens_of(await answer) == [50, 51, 52, 53, 54, 55]
    (second,) = other.submitted
    assert second.token_ids == (*first.token_ids, 50, 51)


@pytest.mark.parametrize("role", ROLES)
async def test_a_server_that_says_nothing_counts_as_absent_until_it_speaks(make_stack, monkeypatch, role):
    stack = await make_stack(hold_s=LONG)
    answer = await begin(stack)
    server = only(stack, role)
    monkeypatch.setattr(connection, "DESCRIBE_TIMEOUT_S", SHORT)
    server.freeze()
    await until(lambda: stack.services.pool.num_connected()[role] == 0)
    waiting = asyncio.create_task(stack.complete(prompt=PROMPT, max_tokens=1))
    await until(lambda: state(stack) == (1, 0))
    assert not answer.done(), "what is under way there may still come"
    server.thaw()
    monkeypatch.setattr(connection, "DESCRIBE_TIMEOUT_S", TIMEOUT_S)
    stack.decode[0].script = saying([50])
    assert (await waiting).status_code == 200
    assert stack.decode[0].submitted[0].request_id not in stack.decode[0].cancelled
    answer.cancel()


async def frozen_with_a_request(stack, monkeypatch):
    """Returns a decode server that is frozen while a request waits there, how the router sees it, and the
    request."""
    decode = stack.decode[0]
    (worker,) = stack.services.pool._decode
    decode.script = silent
    waiting = asyncio.create_task(stack.complete(prompt=PROMPT, max_tokens=1))
    await until(lambda: decode.submitted)
    monkeypatch.setattr(connection, "DESCRIBE_TIMEOUT_S", SHORT)
    decode.freeze()
    await until(lambda: worker.info is None and worker.problem)
    return decode, worker, waiting


async def test_a_decode_server_that_sends_something_is_not_silent_any_more(make_stack, monkeypatch):
    """What failed there while it was frozen is tried again there, though nobody has looked since the thaw."""
    stack = await make_stack(hold_s=0.0)
    decode, worker, waiting = await frozen_with_a_request(stack, monkeypatch)
    monkeypatch.setattr(worker._connection, "look", asyncio.Event().wait)
    decode.script = saying([50])
    error = ErrorReply("transfer_failed", "its lease has expired")
    decode.send(RequestOutput(decode.submitted[0].request_id, (), finish_reason="error", error=error))
    assert (await waiting).status_code == 200
    assert (worker.info is not None, worker.problem) == (True, "")


async def test_a_decode_server_that_sends_only_stats_is_not_silent_any_more(make_stack, monkeypatch):
    """Its stats come more often than the router looks. They say nothing of the stream, so it looks all the
    same."""
    monkeypatch.setattr(worker_watch, "BUSY_INTERVAL_S", SHORT / 20)
    stack = await make_stack(probe_interval_s=SHORT)
    decode, worker, waiting = await frozen_with_a_request(stack, monkeypatch)
    monkeypatch.setattr(connection, "DESCRIBE_TIMEOUT_S", TIMEOUT_S)
    decode.thaw()
    await until(lambda: worker.info is not None)
    assert not waiting.done()
    waiting.cancel()


async def test_a_server_that_answers_late_but_sends_tokens_is_not_frozen(make_stack, monkeypatch):
    stack = await make_stack()
    decode, looks = stack.decode[0], []
    (worker,) = stack.services.pool._decode
    failed = worker._connection.failed
    monkeypatch.setattr(worker._connection, "failed", lambda why: (looks.append(why), failed(why)))
    seen = decode.num_described
    answer = await begin(stack)
    monkeypatch.setattr(connection, "DESCRIBE_TIMEOUT_S", SHORT)
    decode.freeze()
    request_id = decode.submitted[0].request_id

    async def talk():
        while True:
            decode.send(RequestOutput(request_id, (52,)))
            await asyncio.sleep(SHORT / 20)

    await until(lambda: decode.num_described > seen)  # it was quiet, so it was asked
    talking = asyncio.create_task(talk())
    until_s = asyncio.get_running_loop().time() + 5 * SHORT
    await until(lambda: asyncio.get_running_loop().time() > until_s)
    assert (worker.info is not None, looks) == (True, [])
    talking.cancel()
    answer.cancel()
