"""What a client gets when a server fails, is lost or takes too long, and what happens to its other
choices."""

import asyncio

import pytest

from testing.conditions import until
from testing.router.scripted_router import events_of
from testing.router.scripted_servers import failing, hanging, saying, silent
from wire.errors import CapacityError, TwinfangError


async def test_an_error_of_a_server_before_the_first_token_is_an_http_error(make_stack):
    stack = await make_stack()
    stack.decode[0].script = failing(CapacityError("no room for it"))
    for stream in (False, True):
        answer = await stack.complete(stream=stream)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "insufficient_capacity"
        assert answer.json()["error"]["message"] == CapacityError.told_clients


async def test_an_error_in_the_middle_of_a_stream_is_an_error_event(make_stack):
    stack = await make_stack()
    stack.decode[0].script = failing(TwinfangError("it broke"), after=(300,))
    *_, last = await events_of(stack)
    assert last["error"] == {
        "message": TwinfangError.told_clients,
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }


async def test_one_failed_choice_ends_the_others(make_stack):
    stack = await make_stack()

    async def script(submit, send):
        if submit.params.seed == 1:
            await failing(TwinfangError("it broke"))(submit, send)
        else:
            await hanging(submit, send)

    stack.decode[0].script = script
    answer = await stack.complete(n=3, seed=0)
    assert answer.status_code == 500
    await until(lambda: len(stack.decode[0].cancelled) == 2)


async def test_a_ticket_without_a_decode_server_is_given_back(make_stack):
    stack = await make_stack()
    prefill, decode = stack.prefill[0], stack.decode[0]

    async def lose_decode(request):
        await decode.stop()
        await until(lambda: stack.services.pool.num_connected()["decode"] == 0)
        return prefill.reply(request)

    prefill.script = lose_decode
    answer = await stack.complete(prompt="hello world")
    assert answer.status_code == 503
    await until(lambda: prefill.abandoned == [prefill.requests[0].request_id])


async def test_another_decode_server_takes_the_ticket_of_one_that_was_lost(make_stack, words):
    stack = await make_stack(num_decode=2)
    prefill = stack.prefill[0]

    async def lose_first_choice(request):
        await stack.decode[0].stop()
        await until(lambda: stack.services.pool.num_connected()["decode"] == 1)
        return prefill.reply(request)

    stack.decode[1].script = saying(words.encode_now(" again"))
    prefill.script = lose_first_choice
    answer = await stack.complete(prompt="hello world")
    assert answer.json()["choices"][0]["text"] == " again"
    assert prefill.abandoned == []


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_on_a_stream_that_breaks_end_with_an_error_and_later_ones_are_served(
    make_stack, words, stream
):
    stack = await make_stack()
    decode = stack.decode[0]
    decode.script = hanging
    started = asyncio.Event()
    request = asyncio.create_task(events_of(stack, started) if stream else stack.complete())
    # A stream that breaks before its first event is still an ordinary error.
    await until(lambda: started.is_set() if stream else decode.submitted)
    await decode.stop()
    if stream:
        error = (await request)[-1]["error"]
    else:
        answer = await request
        assert answer.status_code == 503
        error = answer.json()["error"]
    assert error["code"] == "no_server_available"
    decode.script = saying(words.encode_now(" world"))
    await decode.start()
    await until(lambda: stack.services.pool.not_ready_reason() is None)
    assert (await stack.complete()).json()["choices"][0]["text"] == " world"


async def test_a_request_past_its_time_limit_ends_with_504(make_stack):
    stack = await make_stack(request_timeout_s=1.0)
    stack.decode[0].script = silent
    answer = await stack.complete()
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    await until(lambda: stack.decode[0].cancelled)


async def test_a_router_that_is_full_answers_429(make_stack):
    stack = await make_stack(max_requests_in_flight=2, max_queue=0)
    decode = stack.decode[0]
    decode.script = hanging
    waiting = [asyncio.create_task(stack.complete()) for _ in range(2)]
    await until(lambda: len(decode.submitted) == 2)
    for stream in (False, True):
        answer = await stack.complete(stream=stream)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "overloaded"
    for request in waiting:
        request.cancel()
    await until(lambda: stack.gate.num_in_flight == 0)
    decode.script = saying([300])
    assert (await stack.complete()).status_code == 200
