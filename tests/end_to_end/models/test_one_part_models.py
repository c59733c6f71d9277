"""Stacks of models without states (Llama) or without KV (Mamba-2): returning conversations, moved
requests."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from testing.checkpoints.families import make_family_checkpoint
from testing.fleets.clients import greedy_body
from testing.fleets.moving import (
    TOKEN,
    admin,
    decode_workers,
    is_drained,
    num_retries,
    stream,
    until_begun,
    until_both_serve,
)
from testing.fleets.stack import slowed_stack

NUM_REQUESTS = 8
NUM_TURNS = 4
ANSWER = 21
FLAGS = (
    *("--decode", "2", "--max-model-len", "512", "--max-num-seqs", "16", "--cache-memory", "0.1"),
    *("--threads", "1", "--speculative", "2", "--conversation-return"),
)


@pytest.fixture(scope="module", params=["llama", "mamba-2"])
def stack(request, tmp_path_factory):
    model_dir = make_family_checkpoint(tmp_path_factory.mktemp(request.param), request.param, seed=4)
    token_file = tmp_path_factory.mktemp("admin") / "token"
    token_file.write_text(TOKEN)
    flags = ("--model", str(model_dir), "--admin-token-file", str(token_file), *FLAGS)
    with slowed_stack("up", *flags) as running:
        yield running


def answer_of(stack, prompt):
    reply = httpx.post(f"{stack.url}/v1/completions", json=greedy_body(prompt, ANSWER), timeout=60.0).json()
    return reply["choices"][0]["token_ids"]


@pytest.mark.exhaustive
def test_later_turns_of_a_conversation_compute_only_what_is_new(stack):
    choose = random.Random(1)
    prompt = [choose.randrange(6, 150) for _ in range(101)]
    computed = []
    for _ in range(NUM_TURNS):
        before = stack.stats("prefill-0")["prefill-0"].prefill_tokens
        answer = answer_of(stack, prompt)
        computed.append(stack.stats("prefill-0")["prefill-0"].prefill_tokens - before)
        salted = greedy_body(prompt, ANSWER) | {"cache_salt": "another"}  # nothing of it is cached
        reply = httpx.post(f"{stack.url}/v1/completions", json=salted, timeout=60.0).json()
        assert reply["choices"][0]["token_ids"] == answer
        prompt = prompt + answer + [choose.randrange(6, 150) for _ in range(15)]
    assert computed == [100] + [15] * (NUM_TURNS - 1)


@pytest.mark.exhaustive
def test_answers_go_on_at_another_server_when_theirs_is_drained(stack):
    choose = random.Random(2)
    asked = [
        {
            "prompt": [choose.randrange(6, 150) for _ in range(choose.randint(2, 150))],
            "max_tokens": 300,
            "temperature": 0,
            "ignore_eos": True,
        }
        for _ in range(NUM_REQUESTS)
    ]
    until_both_serve(stack)
    expected = [stream(stack.url, body) for body in asked]
    begun, retries = threading.Semaphore(0), num_retries(stack.url)
    first, _ = decode_workers(stack)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        with stack.slow_steps():
            answers = [pool.submit(stream, stack.url, body, begun) for body in asked]
            until_begun(begun, NUM_REQUESTS)
            admin(stack, "POST", f"/workers/{first}/drain")
            stack.wait_until(lambda: is_drained(stack, first), "it has let go of all")
        assert [answer.result(timeout=60) for answer in answers] == expected
    assert num_retries(stack.url) == retries, "states or blocks were handed over; nothing was computed twice"
    requests = admin(stack, "GET", f"/requests?limit={NUM_REQUESTS}")["requests"]
    timelines = [admin(stack, "GET", f"/requests/{one['id']}")["timeline"] for one in requests]
    assert any(event["name"] == "moved" for timeline in timelines for event in timeline)
    admin(stack, "POST", f"/workers/{first}/undrain")
    stack.wait_until(lambda: all(map(has_nothing_to_do, stack.stats().values())), "nothing is under way")
    assert not any(any(stats.transfer_failures.values()) for stats in stack.stats().values())


def has_nothing_to_do(stats):
    return (stats.num_running, stats.num_waiting, stats.transfers_in_flight) == (0, 0, 0)
