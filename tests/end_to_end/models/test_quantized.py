"""FP8 and int8 weights through HTTP: tokens are those of transformers with the dequantised weights."""

import random

import pytest

from testing.checkpoints.quantized import dequantized, write_quantized
from testing.checkpoints.random_checkpoint import DENSE_WITH_MTP, make_checkpoint, transformers_logits
from testing.fleets.clients import all_at_once, greedy_body
from testing.fleets.stack import running_stack
from testing.oracles.ties import MAX_TIES, count_ties

NUM_TOKENS = 48
LENGTHS = [1, 2, 8, 17, 33, 64, 130]


def prompts():
    choose = random.Random(3)
    return [[choose.randrange(6, 160) for _ in range(length)] for length in LENGTHS]


async def answers_of(command, model_dir, *flags):
    """Fails where an answer is another than transformers' but for ties; returns all."""
    flags += ("--model", str(model_dir), "--block-size", "8", "--max-batch-tokens", "64")
    with running_stack(command, *flags, "--max-num-seqs", "16", "--cache-memory", "0.1") as stack:
        answers = await all_at_once(stack, [greedy_body(prompt, NUM_TOKENS) for prompt in prompts()])
    ties = 0
    for prompt, answer in zip(prompts(), answers, strict=True):
        assert len(answer.token_ids) == NUM_TOKENS
        logits = transformers_logits(dequantized(model_dir), [*prompt, *answer.token_ids[:-1]])
        ties += count_ties(len(prompt), answer.token_ids, logits)
    assert ties <= len(LENGTHS) * NUM_TOKENS * MAX_TIES
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize(
    ("name", "command", "flags"),
    [
        ("modelopt", "up", ("--speculative", "2")),
        pytest.param("modelopt", "serve", (), marks=pytest.mark.exhaustive),
        pytest.param("block fp8", "up", ("--tensor-parallel", "2"), marks=pytest.mark.exhaustive),
        pytest.param("packed int8 group", "up", (), marks=pytest.mark.exhaustive),
        pytest.param("packed int8 group", "serve", (), marks=pytest.mark.exhaustive),
    ],
)
async def test_greedy_tokens_are_those_of_the_dequantised_checkpoint(tmp_path, name, command, flags):
    source = make_checkpoint(tmp_path / "source", DENSE_WITH_MTP, seed=7)
    await answers_of(command, write_quantized(source, tmp_path / "model", name), *flags)


@pytest.mark.exhaustive
async def test_disaggregated_answers_equal_monolithic_ones(tmp_path):
    source = make_checkpoint(tmp_path / "source", DENSE_WITH_MTP, seed=8)
    model_dir = write_quantized(source, tmp_path / "model", "modelopt")
    assert await answers_of("up", model_dir) == await answers_of("serve", model_dir)
