"""Deadlines are passed on: servers end requests that nobody waits for, even if no router tells them to."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from testing.fleets.clients import greedy_body
from testing.router.prefill_calls import prefill
from wire.codec import encode
from wire.errors import DeadlineError
from wire.messages.generation import PrefillRequest, StepNews, Submit
from wire.messages.sampling_params import SamplingParams
from wire.rpc import STREAM_PATH, decode_stream_reply

TOO_LONG = 3000
"""Tokens that take longer than the deadlines here."""


@pytest.fixture
def stack(stacks):
    return stacks("up", "--max-num-seqs", "16")


async def test_an_answer_that_is_late_is_a_504_and_leaves_nothing_behind(stack):
    body = greedy_body([7] * 40, TOO_LONG)
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
        response = await client.post("/v1/completions", json=body, headers={"X-Request-Timeout": "0.5"})
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    stack.wait_until(stack.is_idle, "all blocks and slots of both servers are free")


async def test_a_decode_server_ends_a_late_request_by_itself(stack):
    params = SamplingParams(max_tokens=TOO_LONG, ignore_eos=True)
    async with stack.channel("decode-0") as channel:
        stream = channel.stream_stream(STREAM_PATH)()
        await stream.write(encode(Submit("late", (7,), params, None, timeout_s=0.4)))
        outputs = []
        while not outputs or outputs[-1].finish_reason is None:
            news = decode_stream_reply(await asyncio.wait_for(stream.read(), 60))
            outputs += news.outputs if isinstance(news, StepNews) else ()
        assert (outputs[-1].finish_reason, outputs[-1].error.code) == ("error", "deadline_exceeded")
        stack.wait_until(stack.is_idle, "all blocks and slots of both servers are free")  # the call is open
        stream.cancel()


async def test_a_prefill_server_ends_a_late_prompt(stack):
    request = PrefillRequest("late", tuple(5 + i % 900 for i in range(4000)), timeout_s=0.1)
    async with stack.channel("prefill-0") as channel:
        with pytest.raises(DeadlineError):
            async for _ in prefill(channel, request):
                pass
    stack.wait_until(stack.is_idle, "all blocks and slots of both servers are free")
