"""Many streams at the same time, many of them cut off: the others are not affected, and nothing is left
over."""

import asyncio
import random
import signal

import httpx
import pytest

from testing.fleets.clients import (
    TIMEOUT_S,
    complete,
    greedy_body,
    http_client,
    one_at_a_time,
    stream,
)
from testing.fleets.stack import running_router, running_stack

NUM_STREAMS = 64


def bodies():
    choose = random.Random(5)
    lengths = [1, 2, 17, 64, 65, 200, 500, 900]
    return [
        greedy_body(
            [choose.randrange(5, 900) for _ in range(lengths[i % len(lengths)])], choose.randint(20, 60)
        )
        for i in range(NUM_STREAMS)
    ]


async def consume(client, body, cut_after):
    """Streams an answer; leaves after ``cut_after`` events if that is not None."""
    events = 0
    answer = None
    async for answer in stream(client, body):  # noqa: B007 - the last one is returned
        events += 1
        if events == cut_after:
            break
    return answer


async def test_64_streams_of_which_a_third_are_cancelled_midway(stacks):
    stack = stacks("up", "--max-num-seqs", "16")
    expected = await one_at_a_time(stack, bodies())
    choose = random.Random(6)
    cuts = [choose.randint(1, 12) if i % 3 == 0 else None for i in range(NUM_STREAMS)]
    async with http_client(stack) as client:
        answers = await asyncio.gather(
            *(consume(client, body, cut) for body, cut in zip(bodies(), cuts, strict=True))
        )
    for cut, answer, reference in zip(cuts, answers, expected, strict=True):
        if cut is None:
            assert (answer.token_ids, answer.text) == (reference.token_ids, reference.text)
        else:
            assert answer.token_ids == reference.token_ids[: len(answer.token_ids)]
    stack.wait_until(stack.is_idle, "all blocks and slots of both servers are free")


@pytest.mark.in_clear  # the second router has no certificate
async def test_two_router_processes_over_the_same_servers_answer_alike(stacks):
    """They know nothing of one another: what each sends, the servers sort out."""
    stack = stacks("up", "--max-num-seqs", "16")
    expected = await one_at_a_time(stack, bodies()[:24])
    flags = [f"--{p.name.partition('-')[0]}={p.address}" for p in stack.processes().values() if "-" in p.name]

    async def complete_anew(url, body):
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:  # any of the processes
            return await complete(client, body)

    with running_router("--workers", "2", *flags) as url:
        answers = await asyncio.gather(*(complete_anew(url, body) for body in bodies()[:24]))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    stack.wait_until(stack.is_idle, "all blocks and slots of both servers are free")


async def test_requests_cut_off_before_their_first_token_leave_nothing_behind(stacks):
    stack = stacks("up", "--max-num-seqs", "16")
    choose = random.Random(9)

    async def cut(client, body, after_s):
        try:
            await asyncio.wait_for(consume(client, body, None), after_s)
        except TimeoutError:
            return True
        return False

    async with http_client(stack) as client:
        was_cut = await asyncio.gather(
            *(cut(client, body | {"max_tokens": 100}, choose.uniform(0.0, 0.5)) for body in bodies())
        )
    assert any(was_cut)
    stack.wait_until(stack.is_idle, "all blocks and slots of both servers are free")


@pytest.mark.exhaustive
async def test_many_equal_prompts_do_not_run_out_of_leases(stacks):
    stack = stacks("up", "--max-num-seqs", "4")
    body = greedy_body([9] * 33, 40, n=40)
    async with http_client(stack) as client:
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answers = {tuple(choice["token_ids"]) for choice in response.json()["choices"]}
    assert len(answers) == 1
    assert stack.processes()["prefill-0"].restarts == 0
    stack.wait_until(stack.is_idle, "all leases have ended")


@pytest.mark.exhaustive
async def test_a_decode_server_that_dies_leaves_no_lease_behind():
    with running_stack("up", "--max-num-seqs", "8") as stack:
        async with http_client(stack) as client:
            stack.kill("decode-0", signal.SIGSTOP)
            requests = [
                asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies()[1:9]
            ]
            wanted = sum(len(body["prompt"]) > 1 for body in bodies()[1:9])
            await asyncio.to_thread(
                stack.wait_until, lambda: prefill_leases(stack) == wanted, "all prompts are leased"
            )
            stack.kill("decode-0")
            for response in await asyncio.gather(*requests):
                assert response.status_code == 200, "its next life answers them"
        stack.wait_until(stack.is_ready, "the decode server is back", 60)
        stack.wait_until(stack.is_idle, "all leases have ended, long before their time to live")


def prefill_leases(stack):
    return stack.stats("prefill-0")["prefill-0"].leases_held
