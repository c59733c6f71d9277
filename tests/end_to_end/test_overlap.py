"""Long prompts are read while they are computed: the same answers, and most of the bytes come early."""

from __future__ import annotations

import random

import pytest

from tests.end_to_end.clients import greedy_body, one_at_a_time

CHUNK = 64
NUM_CHUNKS = 10
FLAGS = ("--max-num-seqs", "16", "--block-size", "16", "--max-model-len", "1024")
OVERLAPPED = (*FLAGS, "--max-batch-tokens", str(CHUNK))


def prompts(seed, count, num_tokens=CHUNK * NUM_CHUNKS):
    choose = random.Random(seed)
    return [[choose.randrange(5, 900) for _ in range(num_tokens)] for _ in range(count)]


@pytest.fixture(scope="module")
def plain(module_stacks):
    """The same model with both roles and no handoff."""
    return module_stacks("serve", *FLAGS)


@pytest.fixture(scope="module")
def overlapped(module_stacks):
    return module_stacks("up", *OVERLAPPED, "--conversation-return")


def figures(stack):
    stats = stack.stats()
    return stats["decode-0"].transfer_bytes, stats["decode-0"].early_bytes, stats["prefill-0"].prefill_tokens


async def test_most_of_a_long_prompt_is_there_before_it_is_computed(plain, overlapped):
    bodies = [greedy_body(prompt, 12) for prompt in prompts(1, 3)]
    before = figures(overlapped)
    answers = await one_at_a_time(overlapped, bodies)
    transferred, early, computed = (
        after - then for after, then in zip(figures(overlapped), before, strict=True)
    )
    assert [a.token_ids for a in answers] == [a.token_ids for a in await one_at_a_time(plain, bodies)]
    assert computed == 3 * (CHUNK * NUM_CHUNKS - 1)
    assert 0 < early < transferred, "h(N-1) is never early"
