"""When a client disconnects, its request ends, on whichever server it is."""

import asyncio

import pytest

from testing.conditions import until
from testing.router.scripted_servers import hanging, silent


@pytest.mark.parametrize("script", [hanging, silent])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_cancels_its_request_on_the_decode_server(make_stack, script, stream):
    stack = await make_stack()
    decode = stack.decode[0]
    decode.script = script
    request = asyncio.create_task(stack.complete(stream=stream))
    await until(lambda: decode.submitted)
    request.cancel()
    await until(lambda: decode.cancelled == [decode.submitted[0].request_id])
    await until(lambda: stack.gate.num_in_flight == 0)
    assert await stack.metric("twinfang_requests_total", outcome="cancelled") == 1
    assert await stack.metric("twinfang_requests_in_flight") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_during_prefill_cancels_the_prefill(make_stack, stream):
    stack = await make_stack()
    prefill = stack.prefill[0]

    async def never(_request):
        await asyncio.Event().wait()

    prefill.script = never
    request = asyncio.create_task(stack.complete(prompt="hello world", stream=stream))
    await until(lambda: prefill.requests)
    request.cancel()
    await until(lambda: prefill.num_cancelled == 1)
    await until(lambda: prefill.abandoned == [prefill.requests[0].request_id])
    assert stack.decode[0].submitted == []
