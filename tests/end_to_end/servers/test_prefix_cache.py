"""Prefix caching and preemption over real processes: the same tokens, fewer of them computed and
transferred."""

import random
import re

import httpx
import pytest

from router.access.api_keys import ApiKey, digest_of, new_key
from router.access.key_file import key_line
from testing.fleets.clients import all_at_once, greedy_body, one_at_a_time
from testing.fleets.stack import running_router

FLAGS = ("--max-num-seqs", "16", "--block-size", "16")
COUNTED = (*FLAGS, "--cache-mode", "all", "--cache-policy", "lru")
"""Where states are kept does not depend on earlier requests, so cached tokens can be counted."""


def usage(stack, body):
    reply = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60.0).json()
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"], reply["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    "mode", [*(pytest.param(mode, marks=pytest.mark.exhaustive) for mode in ("none", "align")), "all"]
)
def test_the_second_time_a_prompt_is_neither_computed_nor_moved_again(stacks, mode):
    stack = stacks("up", *FLAGS, "--cache-mode", mode)
    choose = random.Random(1)
    body = greedy_body([choose.randrange(5, 900) for _ in range(200)], 20)
    start = stack.stats()
    first = usage(stack, body)
    middle = stack.stats()
    second = usage(stack, body)
    end = stack.stats()
    assert second[1] == first[1]
    assert first[0] == 0
    computed = end["prefill-0"].prefill_tokens - middle["prefill-0"].prefill_tokens
    first_bytes = middle["decode-0"].transfer_bytes - start["decode-0"].transfer_bytes
    second_bytes = end["decode-0"].transfer_bytes - middle["decode-0"].transfer_bytes
    if mode == "none":
        assert (second[0], computed, second_bytes) == (0, 199, first_bytes)
    else:
        # 192 is the last block boundary; the handoff is h(199) and the one block that is not full.
        assert (second[0], computed) == (192, 7)
        assert second_bytes < first_bytes / 2


@pytest.mark.exhaustive
def test_a_prompt_goes_back_to_the_server_that_has_its_prefix(stacks):
    """That server says so, and the router finds it by keys that it computes itself."""
    stack = stacks("up", *FLAGS, "--prefill", "2", "--prefill-policy", "prefix_affinity")
    choose = random.Random(3)
    prefixes = [[choose.randrange(5, 900) for _ in range(200)] for _ in range(3)]
    for salt, prefix in zip("abc", prefixes, strict=True):
        assert usage(stack, greedy_body(prefix, 2) | {"cache_salt": salt})[0] == 0

    def are_published() -> bool:
        lines = httpx.get(f"{stack.url}/metrics", timeout=60.0).text.splitlines()
        published = [line for line in lines if line.startswith("twinfang_published_prefixes{")]
        return sum(float(line.split()[-1]) for line in published if 'role="prefill"' in line) >= 3

    stack.wait_until(are_published, "the prefill servers have told the router what they have")
    for _ in range(4):
        for salt, prefix in zip("abc", prefixes, strict=True):
            assert usage(stack, greedy_body([*prefix, 7], 2) | {"cache_salt": salt})[0] == 192


async def test_other_answers_of_the_same_prefix_are_exact_in_every_mode(stacks):
    choose = random.Random(2)
    prefix = [choose.randrange(5, 900) for _ in range(150)]
    prompts = [prefix[: choose.randint(20, 150)] + [choose.randrange(5, 900)] * 3 for _ in range(24)]
    bodies = [greedy_body(prompt, 16) for prompt in prompts]
    expected = await one_at_a_time(stacks("up", *FLAGS, "--cache-mode", "none"), bodies)
    for mode in ("align", "all"):
        stack = stacks("up", *FLAGS, "--cache-mode", mode)
        for _ in range(2):
            answers = await all_at_once(stack, bodies)
            assert [a.token_ids for a in answers] == [e.token_ids for e in expected]
        stack.wait_until(stack.is_idle, "nothing is left behind")


def test_another_salt_shares_no_prompt(stacks):
    stack = stacks("up", *COUNTED)
    body = greedy_body([7, 8, 9, 10] * 30, 4)
    assert usage(stack, body | {"cache_salt": "a"})[0] == 0
    assert usage(stack, body | {"cache_salt": "b"})[0] == 0
    assert usage(stack, body | {"cache_salt": "a"})[0] == 112


@pytest.mark.in_clear  # its routers have no certificate
def test_a_neighbour_s_prompt_is_computed_anew_unless_keys_share(stacks, tmp_path):
    """With another key, all tokens of a prompt are computed that a first key has just asked. If an operator
    takes the key out of the salt, the second key computes fewer, and can tell by the time that takes."""
    stack = stacks("up", *COUNTED)
    keys = {name: new_key() for name in ("alice", "bob")}
    path = tmp_path / "keys"
    path.write_text("\n".join(key_line(ApiKey(name, digest_of(key))) for name, key in keys.items()))
    servers = [
        f"--{p.name.partition('-')[0]}={p.address}" for p in stack.processes().values() if "-" in p.name
    ]

    def computed_by(url, name, body):
        before = stack.stats("prefill-0")["prefill-0"].prefill_tokens
        headers = {"Authorization": f"Bearer {keys[name]}"}
        reply = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60.0)
        assert reply.status_code == 200, reply.text
        return stack.stats("prefill-0")["prefill-0"].prefill_tokens - before

    with running_router("--api-keys-file", str(path), *servers) as url:
        body = greedy_body([11, 12, 13, 14] * 50, 2)
        assert [computed_by(url, name, body) for name in ("alice", "bob", "alice", "bob")] == [199, 199, 7, 7]
        forged = body | {"cache_salt": "key alice "}
        assert computed_by(url, "bob", forged) == 199, (
            "what a client sends never reaches another key's prompts"
        )
        assert computed_by(url, "alice", forged) == 199, "and divides its own"
    with running_router("--api-keys-file", str(path), *servers, "--cache-isolation", "none") as url:
        body = greedy_body([15, 16, 17, 18] * 50, 2)
        assert [computed_by(url, name, body) for name in ("alice", "bob")] == [199, 7]


@pytest.mark.exhaustive
async def test_24_requests_through_a_decode_server_with_room_for_six(stacks):
    choose = random.Random(3)
    bodies = [
        greedy_body([choose.randrange(5, 900) for _ in range(choose.randint(280, 310))], 200)
        for _ in range(24)
    ]
    expected = await all_at_once(stacks("up", *FLAGS, "--cache-mode", "none"), bodies)
    small = stacks(
        "up",
        *("--max-num-seqs", "16", "--max-model-len", "512", "--cached-states", "16"),
        *("--cache-memory", "0.0064"),
    )
    blocks_of_each = -(-(280 + 199) // 16)
    assert small.stats()["decode-0"].num_blocks // blocks_of_each == 6
    answers = await all_at_once(small, bodies)
    assert [a.token_ids for a in answers] == [e.token_ids for e in expected]
    small.wait_until(small.is_idle, "nothing is left behind")
    assert small.stats()["decode-0"].preemptions > 0


@pytest.mark.exhaustive
def test_turns_of_more_conversations_than_the_device_has_room_for_are_found_in_host_memory(stacks):
    """They are found as if the device had room for all of them, and the answers are those of no cache."""
    choose = random.Random(4)
    prompts = [[choose.randrange(5, 900) for _ in range(200)] for _ in range(8)]
    bodies = [greedy_body([*prompt, *more], 8) for more in ([], [7, 8, 9]) for prompt in prompts]
    plain = stacks("up", *FLAGS, "--cache-mode", "none")
    expected = [usage(plain, body)[1] for body in bodies]
    small = ("--max-num-seqs", "2", "--max-model-len", "256", "--cached-states", "2")
    stack = stacks("up", *small, "--cache-memory", "0.004", "--host-cache-size", "64M")
    found = [usage(stack, body) for body in bodies]
    assert [tokens for _, tokens in found] == expected
    assert [cached for cached, _ in found[8:]] == [192] * 8
    page = stack.metrics("prefill-0")
    moved = {
        name: float(re.search(rf"^twinfang_host_cache_{name} (\S+)$", page, re.MULTILINE)[1])
        for name in ("promoted_prefixes_total", "promoted_tokens_total", "used_bytes", "size_bytes")
    }
    assert moved["promoted_prefixes_total"] >= 6
    assert moved["promoted_tokens_total"] == 192 * moved["promoted_prefixes_total"]
    assert 0 < moved["used_bytes"] < moved["size_bytes"] <= 64 << 20
