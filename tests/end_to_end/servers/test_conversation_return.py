"""A conversation's next turn computes only its new tokens, and its answer is the same as without a kept
state."""

import random

import httpx
import pytest

from testing.fleets.clients import greedy_body, one_at_a_time

FLAGS = ("--max-num-seqs", "16", "--max-model-len", "1024")
NUM_TURNS = 6
ANSWER = 20


def turns(stack, seed=1):
    """Prompts, answers and prefill tokens computed of a conversation's turns."""
    choose = random.Random(seed)
    prompt = [choose.randrange(5, 900) for _ in range(101)]
    told = []
    for _ in range(NUM_TURNS):
        before = stack.stats()
        body = greedy_body(prompt, ANSWER)
        reply = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60.0).json()
        after = stack.stats()
        answer = reply["choices"][0]["token_ids"]
        computed = after["prefill-0"].prefill_tokens - before["prefill-0"].prefill_tokens
        told.append((len(prompt), answer, computed, reply["usage"]["prompt_tokens_details"]["cached_tokens"]))
        prompt = prompt + answer + [choose.randrange(5, 900) for _ in range(15)]
    return told


@pytest.mark.exhaustive
def test_later_turns_compute_only_what_is_new_and_answer_the_same(stacks):
    plain = turns(stacks("up", *FLAGS, "--cache-mode", "none"))
    for mode in ("none", "align", "all"):
        returned = turns(stacks("up", *FLAGS, "--cache-mode", mode, "--conversation-return"))
        assert [answer for _, answer, _, _ in returned] == [answer for _, answer, _, _ in plain]
        # The state covers all but the answer's last token; token N is the decode server's.
        assert [computed for _, _, computed, _ in returned] == [100] + [15] * (NUM_TURNS - 1)
        assert [cached for *_, cached in returned] == [0, *(n - 16 for n, *_ in returned[1:])]


def test_what_is_kept_gives_way_to_those_who_wait(stacks):
    stack = stacks(
        "up",
        *("--max-num-seqs", "2", "--max-model-len", "512", "--cached-states", "0", "--cache-mode", "none"),
        *("--cache-memory", "0.002", "--conversation-return"),
    )
    choose = random.Random(4)
    for _ in range(6):  # each leaves its state behind; there is room for two
        prompt = [choose.randrange(5, 900) for _ in range(60)]
        body = greedy_body(prompt, 5)
        reply = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=30.0)
        assert reply.status_code == 200, reply.text


@pytest.mark.exhaustive
async def test_a_state_that_was_given_up_is_computed_anew(stacks):
    stack = stacks("up", *FLAGS, "--cache-mode", "all", "--conversation-return")
    expected = await one_at_a_time(stacks("up", *FLAGS, "--cache-mode", "none"), [greedy_body([7] * 50, 8)])
    (first,) = await one_at_a_time(stack, [greedy_body([7] * 50, 8)])
    assert first.token_ids == expected[0].token_ids
    old = stack.kill("decode-0")
    stack.wait_until(lambda: stack.has_restarted("decode-0", old), "it is back", 60)
    follow_up = [*([7] * 50), *first.token_ids, 9, 9]
    (second,) = await one_at_a_time(stack, [greedy_body(follow_up, 8)])
    (plain,) = await one_at_a_time(stacks("up", *FLAGS, "--cache-mode", "none"), [greedy_body(follow_up, 8)])
    assert second.token_ids == plain.token_ids


def test_a_chat_s_next_turn_resumes_too(stacks):
    stack = stacks("up", *FLAGS, "--cache-mode", "all", "--conversation-return")
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    cached, lengths = [], []
    for text in ("And 2 + 2?", "And 5 + 1?", ""):
        body = {"messages": messages, "max_tokens": 20, "temperature": 0}
        reply = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60.0).json()
        usage = reply["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        lengths.append(usage["total_tokens"])
        messages += [reply["choices"][0]["message"], {"role": "user", "content": text}]
    # Its end is a token of the template's own, so a turn goes on from all that was said before it.
    assert cached == [0, lengths[0] - 1, lengths[1] - 1]
