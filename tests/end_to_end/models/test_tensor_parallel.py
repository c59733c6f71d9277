"""Prefill and decode servers with different numbers of ranks give the tokens of a single engine.

Heads and channels are read from the ranks that have them; the bundled model has fewer KV heads and groups
than four ranks, so there they hold copies.
"""

import asyncio
import random
from functools import cache

import pytest

from testing.checkpoints.families import make_family_checkpoint
from testing.checkpoints.random_checkpoint import MOE_WITH_MTP, make_checkpoint
from testing.engines.speculating import Ask, make_engine, serve
from testing.fleets.clients import all_at_once, greedy_body, one_at_a_time
from testing.fleets.stack import running_stack
from wire.messages.sampling_params import SamplingParams

NUM_TOKENS = 10
LENGTHS = [1, 2, 17, 33, 64, 150]
FLAGS = (
    *("--max-num-seqs", "8", "--max-model-len", "256", "--cache-memory", "0.05", "--threads", "1"),
    *("--max-batch-tokens", "64"),  # prompts of several chunks
)
PAIRS = [
    (2, 1, "moe", ("--cache-mode", "align", "--speculative", "2", "--drafter", "mtp")),
    (1, 2, "bundled", ("--cache-mode", "all")),
    (2, 4, "bundled", ("--cache-mode", "none", "--speculative", "1", "--drafter", "ngram")),
    (4, 2, "bundled", ("--cache-mode", "all", "--speculative", "3", "--drafter", "mtp")),
    (2, 1, "llama", ("--cache-mode", "all", "--speculative", "2")),
    (1, 2, "mamba-2", ("--cache-mode", "align", "--speculative", "2")),
]


@pytest.fixture(scope="module")
def model_dir(bundled_model, tmp_path_factory):
    @cache
    def make(name):
        folder = tmp_path_factory.mktemp(name)
        if name == "bundled":
            return bundled_model
        if name == "moe":
            return make_checkpoint(folder, MOE_WITH_MTP, seed=5)
        return make_family_checkpoint(folder, name, seed=5)

    return make


def bodies():
    choose = random.Random(8)
    prompts = [[choose.randrange(6, 150) for _ in range(length)] for length in LENGTHS]
    prompts.append(prompts[-1][:100] + prompts[2])  # shares a beginning
    return [greedy_body(prompt, NUM_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def expected(model_dir):
    """Tokens of one engine with one rank, of a checkpoint."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    asks = [Ask(tuple(body["prompt"]), params) for body in bodies()]

    @cache
    def tokens(name):
        return [answer.tokens for answer in serve(make_engine(model_dir(name), "none", 0, None, 0), asks)]

    return tokens


@pytest.mark.parametrize(
    ("prefill", "decode", "model", "flags"),
    [PAIRS[0], *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in PAIRS[1:])],
)
def test_greedy_answers_do_not_depend_on_the_numbers_of_ranks(
    model_dir, expected, prefill, decode, model, flags
):
    ranks = ("--prefill-tensor-parallel", str(prefill), "--tensor-parallel", str(decode))
    with running_stack("up", *FLAGS, *ranks, *flags, "--model", str(model_dir(model))) as stack:
        together = asyncio.run(all_at_once(stack, bodies()))
        assert [answer.token_ids for answer in together] == expected(model)
        alone = asyncio.run(one_at_a_time(stack, bodies()[-2:]))
        assert [answer.token_ids for answer in alone] == expected(model)[-2:]
        stack.wait_until(stack.is_idle, "all blocks, slots and leases are free")
        stats = stack.stats("decode-0")["decode-0"]
        assert stats.transfer_bytes > 0
        assert sum(stats.transfer_failures.values()) == 0
