"""A client's time limit: which values are allowed, and how servers get it."""

from __future__ import annotations

import asyncio
import time

import pytest

from testing.conditions import TIMEOUT_S, until
from testing.router.scripted_servers import hanging, saying, silent

HEADER = "X-Request-Timeout"
LATE = "1"
"""Seconds in which a busy machine, too, gets a request to its server."""


async def post(stack, timeout: str | None, **body):
    headers = {} if timeout is None else {HEADER: timeout}
    fields = {"prompt": [5, 6, 7], "max_tokens": 4}
    return await stack.client.post("/v1/completions", json=fields | body, headers=headers)


async def test_servers_are_told_what_time_is_left(make_stack):
    stack = await make_stack(request_timeout_s=80.0)
    stack.decode[0].script = saying([50])
    for given, at_most in ((None, 80.0), ("60", 60.0), ("30.75", 30.75), ("3600", 80.0)):
        assert (await post(stack, given)).status_code == 200
        told = stack.decode[0].submitted[-1].timeout_s
        assert 0 < told <= at_most
        assert told > at_most / 4


async def test_a_chat_s_limit_counts_as_well(make_stack):
    stack = await make_stack()
    stack.decode[0].script = silent
    messages = [{"role": "user", "content": "hello"}]
    headers = {HEADER: "0.2"}
    response = await stack.client.post("/v1/chat/completions", json={"messages": messages}, headers=headers)
    assert response.status_code == 504


@pytest.mark.parametrize("script", [silent, hanging])
async def test_what_is_late_is_cancelled_everywhere_and_answered_504(make_stack, script):
    stack = await make_stack()
    stack.decode[0].script = script
    started = time.monotonic()
    response = await post(stack, LATE)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert time.monotonic() - started < TIMEOUT_S, "the router's own limit"
    await until(lambda: len(stack.decode[0].cancelled) == 1)


async def test_a_prefill_that_is_late_is_cancelled(make_stack):
    stack = await make_stack()

    async def never(_request):
        await asyncio.Event().wait()

    stack.prefill[0].script = never
    assert (await post(stack, LATE)).status_code == 504
    await until(lambda: stack.prefill[0].num_cancelled == 1)
    assert not stack.decode[0].submitted


@pytest.mark.parametrize("given", ["0", "-1", "soon", "nan", "inf", "", "1e999", "٣"])
async def test_what_is_no_time_is_refused(make_stack, given):
    stack = await make_stack()
    response = await stack.client.post(
        "/v1/completions", json={"prompt": [5]}, headers={HEADER: given.encode()}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == HEADER
