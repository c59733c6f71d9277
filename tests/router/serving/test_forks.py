"""Choices of one prompt share one prefill and one handoff. After a failure each goes on by itself."""

from __future__ import annotations

import asyncio

import pytest

from testing.conditions import until
from testing.router.scripted_servers import failing, saying, silent
from wire.errors import TransferError, UnavailableError
from wire.messages.generation import RequestOutput

PROMPT = "a prompt of several tokens, which takes a prefill"


@pytest.fixture
async def stack(make_stack):
    stack = await make_stack(num_prefill=2, num_decode=2)
    wanted = {"prefill": 2, "decode": 2}
    await until(lambda: stack.services.pool.num_connected() == wanted)
    for server in stack.decode:
        server.script = saying([50, 51])
    return stack


def submitted(stack):
    return [submit for server in stack.decode for submit in server.submitted]


def prefilled(stack):
    return [request for server in stack.prefill for request in server.requests]


async def ask(stack, **body):
    response = await stack.complete(**{"prompt": PROMPT, "max_tokens": 2, "n": 4, "seed": 7} | body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_choices_share_one_prefill_and_go_to_one_decode_server(stack):
    answer = await ask(stack, prompt=[PROMPT, f"another: {PROMPT}"])
    assert [choice["index"] for choice in answer["choices"]] == list(range(8))
    assert answer["usage"]["completion_tokens"] == 16
    assert len(prefilled(stack)) == 2
    for prompt in prefilled(stack):
        (server,) = [
            server
            for server in stack.decode
            if prompt.token_ids in [submit.token_ids for submit in server.submitted]
        ]
        choices = [submit for submit in server.submitted if submit.token_ids == prompt.token_ids]
        assert [submit.params.seed for submit in choices] == [7, 8, 9, 10]
        assert [submit.ticket is None for submit in choices] == [False, True, True, True]


@pytest.mark.parametrize("body", [{"prompt": "a"}, {"echo": True, "logprobs": 1}, {"n": 1}])
async def test_other_choices_each_have_their_own(stack, body):
    answer = await ask(stack, **body)
    assert len(answer["choices"]) == body.get("n", 4)
    num_without = sum(submit.ticket is None for submit in submitted(stack))
    assert num_without == (4 if body.get("prompt") else 0)
    assert {submit.forks for submit in submitted(stack)} == {()}


async def test_if_the_prefill_fails_each_choice_goes_on_by_itself(stack):
    async def fails_once(request):
        stack.prefill[0].script = stack.prefill[1].script = None
        raise UnavailableError("out of breath")

    for server in stack.prefill:
        server.script = fails_once
    answer = await ask(stack)
    assert len(answer["choices"]) == 4
    assert len(prefilled(stack)) == 5
    assert len(submitted(stack)) == 4


@pytest.mark.parametrize("reason", ["error", "moved"])
async def test_if_the_first_choice_fails_before_its_first_token_the_others_begin_anew(stack, reason):
    async def ends_first(submit, send):
        if "~" in submit.request_id:
            await saying([50, 51])(submit, send)
        elif submit.ticket is None:
            await silent(submit, send)
        elif reason == "error":
            await failing(TransferError("it did not arrive"))(submit, send)
        else:
            send(RequestOutput(submit.request_id, (), finish_reason="moved"))

    for server in stack.decode:
        server.script = ends_first
    answer = await asyncio.wait_for(ask(stack), 10)
    assert [choice["text"] for choice in answer["choices"]] == [stack.tokenizer.decode([50, 51])] * 4
    assert len(prefilled(stack)) == 5
    first = [submit.request_id for submit in submitted(stack) if "~" not in submit.request_id]
    await until(lambda: set(first[1:]) <= {name for server in stack.decode for name in server.cancelled})


async def test_a_choice_that_has_tokens_goes_on_when_the_first_one_fails(stack):
    async def first_fails_late(submit, send):
        if submit.ticket is None:
            send(RequestOutput(submit.request_id, (50,)))
            await asyncio.sleep(0.3)
            send(RequestOutput(submit.request_id, (51,), finish_reason="length"))
        elif "~" in submit.request_id:
            await saying([50, 51])(submit, send)
        else:
            await asyncio.sleep(0.1)
            await failing(TransferError("it did not arrive"))(submit, send)

    for server in stack.decode:
        server.script = first_fails_late
    answer = await ask(stack)
    assert [choice["text"] for choice in answer["choices"]] == [stack.tokenizer.decode([50, 51])] * 4
    assert len(prefilled(stack)) == 2, "the first choice alone began anew"


async def test_a_decode_server_that_forks_nothing_serves_each_choice(stack):
    """A server of an earlier release refuses the submission and knows only the first choice's name."""

    async def refuses_forks(submit, send):
        if submit.forks:
            reply = UnavailableError("it can't be read")
            await failing(reply)(submit, send)
        elif "~" in submit.request_id:
            await saying([50, 51])(submit, send)

    for server in stack.decode:
        server.script = refuses_forks
    assert len((await ask(stack))["choices"]) == 4
