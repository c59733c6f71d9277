"""Weights that a CPU keeps in fewer bytes, through HTTP, and servers that keep them differently."""

import random

import pytest

from kernels.linear.quantized_weight import quantized_by_rows
from testing.checkpoints.changed_weights import with_changed_weights
from testing.checkpoints.random_checkpoint import DENSE_WITH_MTP, make_checkpoint
from testing.fleets.clients import all_at_once, greedy_body
from testing.fleets.stack import running_stack

NUM_TOKENS = 48
LENGTHS = [1, 2, 8, 17, 33, 64, 130]


async def answers_of(command, model_dir, *flags):
    choose = random.Random(3)
    prompts = [[choose.randrange(6, 160) for _ in range(length)] for length in LENGTHS]
    flags += ("--model", str(model_dir), "--block-size", "8", "--max-batch-tokens", "64")
    with running_stack(command, *flags, "--max-num-seqs", "16", "--cache-memory", "0.1") as stack:
        answers = await all_at_once(stack, [greedy_body(prompt, NUM_TOKENS) for prompt in prompts])
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize(
    ("kept", "change", "flags"),
    [
        ("bfloat16", lambda weight: weight.bfloat16().float(), ()),
        pytest.param(
            *("bfloat16", lambda weight: weight.bfloat16().float(), ("--speculative", "2")),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            *("int8", lambda weight: quantized_by_rows(weight).dequantized(), ()),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
async def test_two_servers_answer_as_one_server_does_with_rounded_weights_in_float32(
    tmp_path, kept, change, flags
):
    source = make_checkpoint(tmp_path / "source", DENSE_WITH_MTP, seed=7)
    expected = await answers_of("serve", with_changed_weights(source, tmp_path / "rounded", change))
    assert await answers_of("up", source, "--weight-dtype", kept, *flags) == expected
