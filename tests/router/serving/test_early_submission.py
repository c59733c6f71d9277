"""A prompt that is still being computed is submitted with its early ticket. Any failure then counts once."""

from __future__ import annotations

import asyncio

import pytest

from testing.conditions import until
from testing.router.scripted_servers import failing, saying, silent
from wire.errors import TransferError, UnavailableError
from wire.messages.generation import RequestOutput
from wire.messages.handoff import PartialTicket

PROMPT = "a prompt of several tokens, which takes a prefill"


@pytest.fixture
async def early(make_stack):
    """Stacks whose first prefill server starts early and computes until ``release`` is set."""

    async def make(**settings):
        stack = await make_stack(**settings)
        wanted = {"prefill": len(stack.prefill), "decode": len(stack.decode)}
        await until(lambda: stack.services.pool.num_connected() == wanted)
        release = asyncio.Event()
        for server in stack.prefill:
            server.starts_early = True

            async def script(request, server=server):
                await release.wait()
                return server.reply(request)

            server.script = script
        for server in stack.decode:
            server.script = saying([50, 51])
        return stack, release

    return make


def submitted(stack):
    return [submit for server in stack.decode for submit in server.submitted]


def ask(stack, **body):
    return asyncio.ensure_future(stack.complete(prompt=PROMPT, **({"max_tokens": 2} | body)))


async def test_a_prompt_is_submitted_while_it_is_computed_and_only_once(early):
    stack, release = await early()
    answer = ask(stack)
    await until(lambda: submitted(stack))
    (submit,) = submitted(stack)
    assert isinstance(submit.ticket, PartialTicket)
    assert submit.ticket.num_tokens == len(submit.token_ids) - 1
    release.set()
    response = await answer
    assert response.status_code == 200
    assert response.json()["choices"][0]["text"] == stack.tokenizer.decode([50, 51])
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 4, "as the reply says"
    assert len(submitted(stack)) == 1


async def test_what_the_decode_server_says_waits_for_the_prefill_s_reply(early):
    """The prompt's log-probabilities come with that reply, and first."""
    stack, release = await early()
    answer = ask(stack, echo=True, logprobs=1)
    await until(lambda: submitted(stack))
    await asyncio.sleep(0.05)
    assert not answer.done()
    release.set()
    logprobs = (await answer).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][-2:] == [stack.tokenizer.decode([token]) for token in (50, 51)]
    assert len(logprobs["tokens"]) == (await answer).json()["usage"]["prompt_tokens"] + 2


async def test_a_prefill_that_fails_takes_its_early_submission_back_and_is_one_failure(early):
    stack, release = await early(num_prefill=2)

    async def fails(request):
        await until(lambda: submitted(stack))
        raise UnavailableError("out of breath")

    async def answers_others(submit, send):
        is_first = first.requests and submit.request_id == first.requests[0].request_id
        await (silent if is_first else saying([50, 51]))(submit, send)

    first, stack.decode[0].script = stack.prefill[0], answers_others
    first.script = fails
    release.set()
    while not first.requests:  # its turn comes
        assert (await ask(stack)).status_code == 200
    assert await stack.metric("twinfang_request_retries_total", code="no_server_available") == 1
    (taken_back,) = stack.decode[0].cancelled
    assert taken_back == first.requests[0].request_id


async def test_a_prefill_server_that_dies_in_mid_prompt_is_replaced(early):
    stack, release = await early(num_prefill=2, probe_interval_s=30.0)
    answer = ask(stack)
    await until(lambda: submitted(stack))
    (asked,) = [server for server in stack.prefill if server.requests]
    release.set()
    await asked.stop()
    response = await answer
    assert response.status_code == 200
    assert response.json()["choices"][0]["text"] == stack.tokenizer.decode([50, 51])


async def test_a_decode_server_that_fails_early_calls_the_prefill_back(early):
    stack, release = await early(num_prefill=2)
    stack.decode[0].script = failing(TransferError("the prompt can't be followed"))
    answer = ask(stack)
    await until(lambda: len(submitted(stack)) == 1)
    (asked,) = [server for server in stack.prefill if server.requests]
    await until(lambda: asked.abandoned == [submitted(stack)[0].request_id])
    await until(lambda: asked.num_cancelled == 1)
    stack.decode[0].script = saying([50, 51])
    release.set()
    assert (await answer).status_code == 200
    assert await stack.metric("twinfang_request_retries_total", code="transfer_failed") == 1
    assert [len(server.requests) for server in stack.prefill] == [1, 1]


async def test_a_decode_server_lost_while_the_prompt_is_computed_is_replaced(early):
    stack, release = await early(num_decode=2)

    async def script(submit, send):
        await release.wait()  # no server has a token before the prompt is computed
        await saying([50, 51])(submit, send)

    for server in stack.decode:
        server.script = script
    answer = ask(stack)
    await until(lambda: submitted(stack))
    (lost,) = [server for server in stack.decode if server.submitted]
    await lost.stop()
    release.set()
    response = await answer
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 2


async def test_a_request_that_is_let_go_while_its_prompt_is_computed_is_followed_by_another_server(early):
    stack, release = await early(num_decode=2)

    async def lets_go_once(submit, send):
        if len(submitted(stack)) == 1:
            send(RequestOutput(submit.request_id, (), finish_reason="moved", ticket=submit.ticket))
        else:
            await saying([50, 51])(submit, send)

    for server in stack.decode:
        server.script = lets_go_once
    answer = ask(stack)
    await until(lambda: len(submitted(stack)) == 2)
    release.set()
    assert (await answer).status_code == 200
    first, second = submitted(stack)
    assert first.ticket == second.ticket
    assert len(stack.prefill[0].requests) == 1, "nothing is prefilled again"
    assert stack.prefill[0].abandoned == []


async def test_a_client_that_goes_away_in_mid_prompt_ends_both_halves(early):
    stack, _ = await early()
    stack.decode[0].script = silent
    answer = ask(stack)
    await until(lambda: submitted(stack))
    answer.cancel()
    (submit,) = submitted(stack)
    await until(lambda: stack.decode[0].cancelled == [submit.request_id])
    await until(lambda: stack.prefill[0].abandoned == [submit.request_id])
