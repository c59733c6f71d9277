"""Failed requests are tried again, on another server if there is one. An answer continues where it broke
off."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from router.serving.dispatch import MAX_ATTEMPTS
from testing.conditions import until
from testing.router.scripted_router import MODEL
from testing.router.scripted_servers import failing, saying
from wire.errors import (
    CapacityError,
    HandshakeError,
    InvalidRequestError,
    LeaseError,
    SanitizerError,
    TransferError,
    UnavailableError,
)
from wire.messages.generation import RequestOutput


def first_fails(error, then):
    """A decode script that fails its first request and serves the others."""
    failed = []

    async def script(submit, send):
        chosen = then if failed else failing(error)
        failed.append(submit.request_id)
        await chosen(submit, send)

    return script


PROMPT = "a prompt of several tokens, which takes a prefill"


async def complete(stack, **body):
    """Once all servers are connected."""
    wanted = {"prefill": len(stack.prefill), "decode": len(stack.decode)}
    if not stack.decode[0].submitted:
        await until(lambda: stack.services.pool.num_connected() == wanted)
    return await stack.complete(prompt=PROMPT, **body)


@pytest.mark.parametrize("error", [TransferError, LeaseError, HandshakeError, SanitizerError])
async def test_a_handoff_that_fails_is_prefilled_on_another_server(make_stack, error):
    stack = await make_stack(num_prefill=2)
    stack.decode[0].script = first_fails(error("the lease ended"), saying([50, 51]))
    response = await complete(stack, max_tokens=2)
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 2
    assert [len(server.requests) for server in stack.prefill] == [1, 1]
    first, second = stack.decode[0].submitted
    assert first.ticket.address != second.ticket.address
    assert first.request_id != second.request_id, "an earlier attempt may still hold its lease"
    assert first.token_ids == second.token_ids
    assert await stack.metric("twinfang_request_retries_total", code=error.code) == 1
    (left,) = [one for one in stack.prefill if one.requests[0].request_id == first.request_id]
    await until(lambda: left.abandoned == [first.request_id])  # its reader may not reach it


async def test_a_prefill_server_that_is_gone_is_left_for_another(make_stack):
    stack = await make_stack(num_prefill=2, probe_interval_s=30.0)
    stack.decode[0].script = saying([50])
    await complete(stack, max_tokens=1)
    served = len(stack.prefill[1].requests)
    await stack.prefill[0].stop()
    for _ in range(4):  # its turn comes
        assert (await complete(stack, max_tokens=1)).status_code == 200
    assert len(stack.prefill[1].requests) == served + 4


async def test_a_decode_server_lost_before_the_first_token_is_replaced(make_stack):
    stack = await make_stack(num_decode=2)
    lost, other = stack.decode

    stops = []

    async def dies(submit, send):  # from a task that the server's end does not cancel
        stops.append(asyncio.get_running_loop().create_task(lost.stop()))

    lost.script, other.script = dies, saying([50, 51])
    for _ in range(2):
        response = await complete(stack, max_tokens=2)
        assert response.status_code == 200
    assert len(lost.submitted) == 1
    assert len(other.submitted) == 2
    await until(lambda: stack.prefill[0].abandoned == [lost.submitted[0].request_id])
    await asyncio.gather(*stops)


async def test_an_answer_that_breaks_off_goes_on_behind_its_tokens_elsewhere(make_stack):
    stack = await make_stack(num_prefill=2, num_decode=2)
    broken = failing(UnavailableError("gone"), after=(50, 51))

    async def script(submit, send):
        await (saying([52, 53]) if submit.num_answered else broken)(submit, send)

    for server in stack.decode:
        server.script = script
    response = await complete(stack, max_tokens=4, logprobs=None)
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 4
    assert response.json()["choices"][0]["text"] == stack.tokenizer.decode([50, 51, 52, 53])
    first, second = [submit for server in stack.decode for submit in server.submitted]
    first, second = sorted((first, second), key=lambda submit: submit.num_answered)
    assert (first.num_answered, second.num_answered) == (0, 2)
    assert second.token_ids == (*first.token_ids, 50, 51)
    assert second.params == first.params
    assert second.params.seed is not None, "the rest is drawn as if nothing had happened"


async def test_an_answer_that_breaks_off_again_and_again_gets_on_as_long_as_there_are_tokens(make_stack):
    stack = await make_stack()

    async def one_each(submit, send):
        step = failing(UnavailableError("gone"), after=(50 + submit.num_answered,))
        await (saying([60]) if submit.num_answered == 6 else step)(submit, send)

    stack.decode[0].script = one_each
    response = await complete(stack, max_tokens=7)
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 7


async def test_a_request_that_is_let_go_is_read_by_another_server(make_stack):
    stack = await make_stack(num_decode=2)

    async def lets_go(submit, send):
        if submit.num_answered:
            await saying([52, 53])(submit, send)
            return
        send(RequestOutput(submit.request_id, (50, 51)))
        kept = dataclasses.replace(submit.ticket, address="decode", num_tokens=len(submit.token_ids) + 1)
        send(RequestOutput(submit.request_id, (), finish_reason="moved", ticket=kept))

    for server in stack.decode:
        server.script = lets_go
    response = await complete(stack, max_tokens=4)
    assert response.json()["choices"][0]["text"] == stack.tokenizer.decode([50, 51, 52, 53])
    [first], [second] = sorted((s.submitted for s in stack.decode), key=lambda sent: sent[0].num_answered)
    assert second.ticket.address == "decode"
    assert second.token_ids == (*first.token_ids, 50, 51)
    assert second.num_answered == 2
    assert sum(len(server.requests) for server in stack.prefill) == 1, "nothing is prefilled again"
    assert await stack.metric("twinfang_request_retries_total", code="no_server_available") == 0


async def test_a_server_that_is_about_to_stop_costs_one_attempt(make_stack):
    """It refuses requests for as long as others read what it had; its stream is still open."""
    stack = await make_stack(num_decode=2)
    stopping, other = stack.decode
    stopping.script = failing(UnavailableError("this decode server is about to stop"))
    other.script = saying([50])
    responses = await asyncio.gather(*(complete(stack, max_tokens=1) for _ in range(16)))
    assert {response.status_code for response in responses} == {200}
    refused = [submit.request_id.partition("~")[0] for submit in stopping.submitted]
    assert len(set(refused)) == len(refused) > 0


async def test_where_all_have_failed_the_one_that_did_so_first_is_tried_again(make_stack):
    """This server has had the most time to come back."""
    stack = await make_stack(num_prefill=2, num_decode=2)
    wanted = {"prefill": 2, "decode": 2}
    servers_of_model = stack.services.pool.models[MODEL]
    await until(lambda: stack.services.pool.num_connected() == wanted)
    fingerprint = stack.decode[0].info.fingerprint
    for servers, choose in (
        (stack.decode, servers_of_model.choose_decode),
        (stack.prefill, lambda avoid: servers_of_model.choose_prefill(fingerprint, avoid=avoid)),
    ):
        for first, last in (servers, servers[::-1]):
            chosen = {choose(avoid=[first.address, last.address]).address for _ in range(3)}
            assert chosen == {first.address}


@pytest.mark.parametrize("error", [InvalidRequestError("no"), CapacityError("too small")])
async def test_what_would_fail_again_is_not_tried_again(make_stack, error):
    stack = await make_stack(num_prefill=2)
    stack.decode[0].script = failing(error)
    response = await complete(stack, max_tokens=4)
    assert response.status_code == error.http_status
    assert error.public in response.text
    assert len(stack.decode[0].submitted) == 1


async def test_attempts_are_bounded_and_the_last_error_is_told(make_stack):
    stack = await make_stack()
    stack.decode[0].script = failing(TransferError("the wire is cut"))
    response = await complete(stack, max_tokens=4)
    assert response.status_code == 502
    assert TransferError.told_clients in response.text
    assert len(stack.decode[0].submitted) == MAX_ATTEMPTS


async def test_the_last_attempt_is_prefilled_where_it_is_decoded_if_that_is_allowed(make_stack):
    stack = await make_stack(ready=False)
    decode = stack.decode[0]
    await decode.stop()  # before the change: else the server that stops could still tell it
    decode.info = dataclasses.replace(decode.info, local_prefill=True, incarnation="another life")
    await decode.start()
    await until(lambda: any(one.info and one.info.local_prefill for one in stack.services.pool._decode))

    async def only_local(submit, send):
        chosen = saying([50]) if submit.ticket is None else failing(TransferError("the wire is cut"))
        await chosen(submit, send)

    decode.script = only_local
    assert (await complete(stack, max_tokens=1)).status_code == 200
    assert [submit.ticket is None for submit in decode.submitted] == [False, False, True]


async def test_a_client_s_prompt_log_probabilities_come_once(make_stack):
    stack = await make_stack(num_prefill=2)
    stack.decode[0].script = first_fails(UnavailableError("not now"), saying([50]))
    response = await complete(stack, max_tokens=1, echo=True, logprobs=1)
    assert response.status_code == 200
    logprobs = response.json()["choices"][0]["logprobs"]
    num_prompt = response.json()["usage"]["prompt_tokens"]
    assert len(logprobs["tokens"]) == num_prompt + 1
