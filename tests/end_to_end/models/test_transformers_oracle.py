"""Greedy tokens and log-probabilities through HTTP, disaggregated, equal those of transformers."""

import asyncio
import random
from contextlib import nullcontext
from functools import cache

import pytest
import torch

from testing.checkpoints.random_checkpoint import (
    DENSE,
    LATENT_MOE,
    WITH_MOE,
    CheckpointShape,
    make_checkpoint,
    transformers_logits,
)
from testing.fleets.clients import all_at_once, greedy_body, http_client, one_at_a_time
from testing.fleets.stack import running_stack
from testing.oracles.ties import MAX_TIES, count_ties

NUM_TOKENS = 64
BLOCK_SIZE = 8
LENGTHS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 63, 64, 65, 200, 500]
"""Around the block size of 8, the scan's chunk size of 16 and the budget of 64 tokens a step."""

SHAPES = {
    "dense": DENSE,
    "moe": WITH_MOE,
    "latent-moe": LATENT_MOE,
    "one-group-wide-heads": CheckpointShape(
        pattern="M*M-", n_groups=1, mamba_num_heads=4, mamba_head_dim=32, chunk_size=32, head_dim=32
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: make_checkpoint(folder / name, shape, seed=7) for name, shape in SHAPES.items()}


def prompts():
    choose = random.Random(11)
    return [[choose.randrange(6, 160) for _ in range(length)] for length in LENGTHS]


@cache
def count_ties_of(model_dir, prompt, answer):
    """Checks every token of an answer against transformers' logits after prompt and answer so far."""
    assert len(answer) == NUM_TOKENS
    return count_ties(len(prompt), answer, transformers_logits(model_dir, [*prompt, *answer[:-1]]))


@pytest.fixture
def stack_of(checkpoints, module_stacks):
    """The dense model's is for all tests; others end with the block."""

    def stack_of(command, name):
        flags = ("--model", str(checkpoints[name]), "--block-size", str(BLOCK_SIZE))
        flags += ("--max-batch-tokens", "64", "--max-num-seqs", "32", "--cache-memory", "0.1")
        if name == "dense":
            return nullcontext(module_stacks(command, *flags))
        return running_stack(command, *flags)

    return stack_of


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("up", "dense"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("up", "moe"),
                ("up", "latent-moe"),
                ("up", "one-group-wide-heads"),
                ("serve", "moe"),
            )
        ),
    ],
)
async def test_greedy_tokens_equal_transformers_at_every_length(checkpoints, stack_of, command, name):
    model_dir = checkpoints[name]
    bodies = [greedy_body(prompt, NUM_TOKENS) for prompt in prompts()]
    with stack_of(command, name) as stack:
        together = await all_at_once(stack, bodies)
        alone = await one_at_a_time(stack, bodies)
        stack.wait_until(stack.is_idle, "all blocks and slots are free")
    ties = 0
    for answers in (together, alone):
        for prompt, answer in zip(prompts(), answers, strict=True):
            ties += count_ties_of(model_dir, tuple(prompt), tuple(answer.token_ids))
    num_tokens = 2 * NUM_TOKENS * len(LENGTHS)
    print(f"{name}, {command}: {ties} ties in {num_tokens} tokens")
    assert ties <= num_tokens * MAX_TIES


async def test_one_token_moves_nothing_and_two_move_one_token_s_block_and_the_state(checkpoints, stack_of):
    model_dir = checkpoints["dense"]
    with stack_of("up", "dense") as stack:
        stack.wait_until(stack.is_idle, "nothing is left of an earlier test")
        before = stack.stats()
        (one,) = await one_at_a_time(stack, [greedy_body([17], NUM_TOKENS)])
        after_one = stack.stats()
        (two,) = await one_at_a_time(stack, [greedy_body([17, 23], NUM_TOKENS)])
        after_two = stack.stats()
    assert after_one["decode-0"].transfer_bytes == before["decode-0"].transfer_bytes
    assert after_one["prefill-0"].num_steps == before["prefill-0"].num_steps
    assert after_two["decode-0"].transfer_bytes > after_one["decode-0"].transfer_bytes
    assert after_two["prefill-0"].prefill_tokens - after_one["prefill-0"].prefill_tokens == 1
    assert count_ties_of(model_dir, (17,), tuple(one.token_ids)) == 0
    assert count_ties_of(model_dir, (17, 23), tuple(two.token_ids)) == 0


@pytest.mark.parametrize("command", ["up", "serve"])
async def test_scores_of_prompts_are_transformers_with_and_without_an_answer(checkpoints, stack_of, command):
    """While other answers are generated; a last chunk of one token is among the lengths."""
    model_dir, sequences = checkpoints["dense"], [*prompts(), [7] * 66, [9] * 129]
    with stack_of(command, "dense") as stack:
        answering = asyncio.create_task(all_at_once(stack, [greedy_body([5, 6, 7], NUM_TOKENS)] * 4))
        scored, answered = await asyncio.gather(*(score(stack, sequences, length) for length in (0, 1)))
        await answering
        stack.wait_until(stack.is_idle, "all blocks, slots and leases are free")
    for sequence, scores, with_answer in zip(sequences, scored, answered, strict=True):
        assert len(scores) == len(sequence)
        assert len(with_answer) == len(sequence) + 1
        assert scores[0] is None
        if len(sequence) > 1:
            logprobs = transformers_logits(model_dir, sequence).log_softmax(-1)
            wanted = logprobs[:-1].gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
            assert torch.allclose(torch.tensor(scores[1:]), wanted, atol=1e-4)
            assert torch.allclose(torch.tensor(with_answer[1:-1]), wanted, atol=1e-4)


async def test_what_lm_eval_takes_for_the_likeliest_tokens_are_transformers_first_choices(
    checkpoints, stack_of
):
    """Asked twice: what a prefix cache holds must not take the place of what is scored."""
    model_dir = checkpoints["dense"]
    sequences = [sequence for sequence in prompts() if len(sequence) > 1]
    for _ in range(8):  # one ends as the model would go on
        sequences[5] = [*sequences[5], int(transformers_logits(model_dir, sequences[5])[-1].argmax())]
    with stack_of("up", "dense") as stack:
        answers = [await echoed_choices(stack, sequences, 1) for _ in range(2)]
    for choices in answers:
        for sequence, choice in zip(sequences, choices, strict=True):
            table = choice["logprobs"]
            likeliest = [
                own == max(top.values())
                for own, top in zip(table["token_logprobs"][1:-1], table["top_logprobs"][1:-1], strict=True)
            ]
            wanted = transformers_logits(model_dir, sequence)[:-1].argmax(-1) == torch.tensor(sequence[1:])
            assert likeliest == wanted.tolist()


async def score(stack, sequences, max_tokens):
    """The log-probabilities of each sequence's tokens; of the answer's too if there is one."""
    choices = await echoed_choices(stack, sequences, max_tokens)
    return [choice["logprobs"]["token_logprobs"] for choice in choices]


async def echoed_choices(stack, sequences, max_tokens):
    """A choice for each sequence, as lm-eval asks for them."""
    body = {"model": stack.model, "prompt": sequences, "max_tokens": max_tokens, "temperature": 0}
    async with http_client(stack) as client:
        response = await client.post("/v1/completions", json=body | {"echo": True, "logprobs": 1})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["usage"]["completion_tokens"] == max_tokens * len(sequences)
    return answer["choices"]
