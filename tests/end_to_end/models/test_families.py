"""Every family through the HTTP endpoint, disaggregated: greedy tokens are the same as those of transformers.

Three families have a pair of cache mode and speculation here; all others and all pairs are exhaustive.
"""

from __future__ import annotations

import random
from functools import cache

import pytest

from testing.checkpoints.families import CASES, family_logits, make_family_checkpoint, mode_pairs
from testing.checkpoints.model_table import Feature
from testing.fleets.clients import all_at_once, greedy_body, one_at_a_time
from testing.fleets.stack import running_stack
from testing.oracles.ties import MAX_TIES, count_ties

NUM_TOKENS = 64
LENGTHS = [1, 2, 8, 9, 17, 33, 64, 130]
"""Around the block size of 8, the scan's chunk size of 16 and the budget of 64 tokens a step."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    @cache
    def make(name):
        return make_family_checkpoint(tmp_path_factory.mktemp(name), name, seed=7)

    return make


def prompts():
    choose = random.Random(11)
    shared = [choose.randrange(6, 160) for _ in range(200)]
    return [shared[:length] for length in LENGTHS] + [
        shared[: length // 2] + [choose.randrange(6, 160) for _ in range(length // 2)]
        for length in LENGTHS[4:]
    ]


@pytest.mark.parametrize(("name", "mode", "k"), mode_pairs(1, ["qwen3-next"]))
async def test_greedy_tokens_equal_transformers(checkpoints, record_property, name, mode, k):
    Feature.DISAGGREGATED.record(record_property, name)
    model_dir = checkpoints(name)
    bodies = [greedy_body(prompt, NUM_TOKENS) for prompt in prompts()]
    flags = ("--model", str(model_dir), "--block-size", "8", "--max-batch-tokens", "64", "--cache-mode", mode)
    drafter = ("--drafter", "mtp") if CASES[name].has_mtp else ()
    flags += ("--speculative", str(k), *drafter) if k else ()
    with running_stack("up", *flags, "--max-num-seqs", "16", "--cache-memory", "0.1") as stack:
        together = await all_at_once(stack, bodies)
        alone = await one_at_a_time(stack, bodies)
        stack.wait_until(stack.is_idle, "all blocks and slots are free")
    ties = 0
    logits_of = cache(lambda tokens: family_logits(model_dir, [*tokens]))  # most answers come twice
    for answers in (together, alone):
        for prompt, answer in zip(prompts(), answers, strict=True):
            assert len(answer.token_ids) == NUM_TOKENS
            logits = logits_of((*prompt, *answer.token_ids[:-1]))
            ties += count_ties(len(prompt), answer.token_ids, logits)
    num_tokens = 2 * NUM_TOKENS * len(bodies)
    print(f"{name}, {mode}, k = {k}: {ties} ties in {num_tokens} tokens")
    assert ties <= num_tokens * MAX_TIES
