"""Sessions over real processes: starts that stay, go first or come back early, on two prefill servers."""

import random
import re

import httpx
import pytest

from testing.fleets.clients import greedy_body
from testing.fleets.router_view import total as router_total

SMALL = ("--max-num-seqs", "2", "--max-model-len", "256", "--cached-states", "2", "--cache-policy", "lru")


def usage(stack, body):
    reply = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60.0).json()
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"], reply["choices"][0]["token_ids"]


def tend(stack, action, **body):
    reply = httpx.post(f"{stack.url}/v1/sessions/{action}", json=body, timeout=60.0)
    assert reply.status_code == 200, reply.text
    return reply.json()


def total(stack, name):
    """The sum of a metric of both prefill servers."""
    pages = [stack.metrics(f"prefill-{number}") for number in range(2)]
    return sum(float(re.search(rf"^{name} (\S+)$", page, re.MULTILINE)[1]) for page in pages)


def prompts_of(num, seed, length=200):
    choose = random.Random(seed)
    return [[choose.randrange(5, 900) for _ in range(length)] for _ in range(num)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("host_cache", ["64M", "2M"])
def test_a_session_s_turns_find_what_it_retained_and_others_go(stacks, host_cache):
    """With 2 MiB for each server, host memory has room for few prompts."""
    stack = stacks(
        *("up", "--block-size", "16", *SMALL, "--cache-memory", "0.004", "--prefill", "2"),
        *("--prefill-policy", "prefix_affinity", "--host-cache-size", host_cache),
    )
    plain = stacks("up", "--block-size", "16", "--max-num-seqs", "2", "--cache-mode", "none")
    (first,), others = prompts_of(1, seed=7), prompts_of(40, seed=8)
    turn = greedy_body(first, 8) | {"session_id": "chat-1"}
    cached, answer = usage(stack, turn)
    assert (cached, answer) == (0, usage(plain, turn)[1])
    told = tend(stack, "retain", session_id="chat-1", seconds=600)
    assert (told["num_servers"], told["num_starts"], told["num_tokens"]) == (2, 1, 192)
    assert tend(stack, "retain", session_id="chat-2", seconds=600)["num_starts"] == 0
    assert total(stack, "twinfang_host_cache_retained_bytes") > 0
    for other in others:
        usage(stack, greedy_body(other, 1))
    before = total(stack, "twinfang_host_cache_promoted_prefixes_total")
    told = tend(stack, "prefetch", session_id="chat-1")
    assert (told["num_starts"], told["num_tokens"]) == (1, 192)
    fetched = total(stack, "twinfang_host_cache_promoted_prefixes_total")
    assert fetched == before + 1
    second = greedy_body([*first, *answer, 7, 8, 9], 8) | {"session_id": "chat-1"}
    cached, answer = usage(stack, second)
    assert (cached, answer) == (192, usage(plain, second)[1])
    assert total(stack, "twinfang_host_cache_promoted_prefixes_total") == fetched, "it was there"
    assert tend(stack, "release", session_id="chat-1")["num_starts"] >= 1
    assert total(stack, "twinfang_host_cache_retained_bytes") == 0
    assert tend(stack, "prefetch", session_id="chat-1")["num_starts"] == 0


@pytest.mark.exhaustive
def test_what_is_retained_is_let_go_when_its_time_is_over(stacks):
    stack = stacks(
        *("up", "--block-size", "16", *SMALL, "--cache-memory", "0.004", "--prefill", "2"),
        *("--prefill-policy", "prefix_affinity", "--host-cache-size", "64M"),
    )
    (prompt,) = prompts_of(1, seed=9)
    usage(stack, greedy_body(prompt, 1) | {"session_id": "chat-9", "prompt_cache_retention": "24h"})
    retained = "twinfang_host_cache_retained_bytes"
    stack.wait_until(lambda: total(stack, retained) > 0, "the request's start is retained")
    assert tend(stack, "retain", session_id="chat-9", seconds=1)["num_starts"] == 1
    stack.wait_until(lambda: total(stack, retained) == 0, "its time is over")


@pytest.mark.exhaustive
def test_a_fork_and_its_origin_both_go_on_from_where_it_began(stacks):
    """Among much else, on two prefill servers. Both find all of the conversation up to the fork.

    Longer ones than a session's home is worth: only the router's knowledge leads to where they are cached.
    """
    stack = stacks(
        *("up", "--block-size", "16", *SMALL, "--max-model-len", "1024", "--cache-memory", "0.016"),
        *("--prefill", "2", "--prefill-policy", "prefix_affinity", "--host-cache-size", "64M"),
    )
    (prompt,), others = prompts_of(1, seed=12, length=720), prompts_of(30, seed=13)
    _, answer = usage(stack, greedy_body(prompt, 8) | {"session_id": "origin"})
    told = tend(stack, "fork", session_id="origin", new_session_id="fork")
    assert (told["num_servers"], told["num_tokens"]) == (2, 704)
    assert tend(stack, "fork", session_id="unknown", new_session_id="x")["num_starts"] == 0
    stack.wait_until(lambda: router_total(stack.url, "twinfang_published_prefixes") >= 1, "it is published")
    ends = {"origin": [*prompt, *answer], "fork": [*prompt, *answer]}
    for turn in range(2):
        for session, tokens in ends.items():
            tokens += [10 + turn, 11, 12 if session == "fork" else 13]
            cached, answer = usage(stack, greedy_body(tokens, 8) | {"session_id": session})
            assert cached >= 704
            tokens += answer
            for other in others[:10]:
                usage(stack, greedy_body(other, 1))
    assert tend(stack, "release", session_id="origin")["num_servers"] == 2
    for other in others:
        usage(stack, greedy_body(other, 1))
    cached, _ = usage(stack, greedy_body([*prompt, 7, 8, 9], 1) | {"session_id": "fork"})
    assert cached >= 704, "what both began from was not the origin's to give up"
