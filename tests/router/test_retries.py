"""Until the first token nothing was said: what fails is tried again, elsewhere if there is an elsewhere."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from router.dispatch import MAX_ATTEMPTS
from tests.router.conftest import until
from tests.router.scripted_servers import failing, saying
from wire.errors import (
    CapacityError,
    HandshakeError,
    InvalidRequestError,
    LeaseError,
    SanitizerError,
    TransferError,
    UnavailableError,
)


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


async def test_after_the_first_token_an_error_is_an_error(make_stack):
    stack = await make_stack(num_prefill=2)
    stack.decode[0].script = failing(TransferError("too late"), after=(50,))
    response = await complete(stack, max_tokens=4)
    assert response.status_code == 502
    assert len(stack.decode[0].submitted) == 1


@pytest.mark.parametrize("error", [InvalidRequestError("no"), CapacityError("too small")])
async def test_what_would_fail_again_is_not_tried_again(make_stack, error):
    stack = await make_stack(num_prefill=2)
    stack.decode[0].script = failing(error)
    response = await complete(stack, max_tokens=4)
    assert response.status_code == error.http_status
    assert error.message in response.text
    assert len(stack.decode[0].submitted) == 1


async def test_attempts_are_bounded_and_the_last_error_is_told(make_stack):
    stack = await make_stack()
    stack.decode[0].script = failing(TransferError("the wire is cut"))
    response = await complete(stack, max_tokens=4)
    assert response.status_code == 502
    assert "the wire is cut" in response.text
    assert len(stack.decode[0].submitted) == MAX_ATTEMPTS


async def test_the_last_attempt_is_prefilled_where_it_is_decoded_if_that_is_allowed(make_stack):
    stack = await make_stack(ready=False)
    decode = stack.decode[0]
    decode.info = dataclasses.replace(decode.info, local_prefill=True)
    await decode.stop()
    await decode.start()
    await until(lambda: stack.services.pool.limits().vocab_size and decode.info.local_prefill)
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
