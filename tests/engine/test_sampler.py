"""Sampling follows its parameters, row by row, whoever shares the batch."""

import numpy as np
import pytest
import torch

from engine.request import Request
from engine.row_table import RowTable
from engine.sampler import Sampler
from engine.uniform import uniform
from wire.sampling_params import SamplingParams

VOCAB = 50


def sample(logits, *params, prompts=None, outputs=None, seeds=None):
    rows = RowTable(len(params), 4)
    requests = []
    for i, one in enumerate(params):
        request = Request(
            f"r{i}",
            list(prompts[i]) if prompts else [1],
            one,
            stop_token_ids=frozenset({2}),
            seed=seeds[i] if seeds else 7,
        )
        request.tokens += outputs[i] if outputs else []
        request.row = i
        rows.fill(request)
        requests.append(request)
    return Sampler(rows).sample(logits, requests)


def random_logits(num_rows, seed=0):
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_takes_the_best_token():
    logits = random_logits(3)
    assert sample(logits, *[SamplingParams(max_tokens=9, temperature=0)] * 3).token_ids == (
        logits.argmax(-1).tolist()
    )


def test_a_draw_is_the_same_alone_and_in_any_company():
    params = [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, top_k=5),
        SamplingParams(max_tokens=9, temperature=0),
        SamplingParams(max_tokens=9, top_p=0.7, temperature=1.7),
        SamplingParams(max_tokens=9, min_p=0.1),
        SamplingParams(max_tokens=9, repetition_penalty=1.3, presence_penalty=0.5),
    ]
    logits = random_logits(len(params))
    seeds = list(range(len(params)))
    together = sample(logits, *params, seeds=seeds).token_ids
    alone = [sample(logits[i : i + 1], params[i], seeds=[seeds[i]]).token_ids[0] for i in range(len(params))]
    assert together == alone


def draws(params, count=20_000):
    """Frequencies of ``count`` draws of one distribution: one row, many seeds."""
    logits = random_logits(1, seed=3)
    rows = RowTable(1, 1)
    request = Request("r", [1], params)
    request.row = 0
    rows.fill(request)
    sampler = Sampler(rows)
    table_rows = np.zeros(count, dtype=np.int64)
    drawn = sampler._draw(logits.expand(count, VOCAB), table_rows, np.arange(count))
    return torch.bincount(drawn, minlength=VOCAB).double(), torch.softmax(
        logits[0].double() / params.temperature, -1
    )


def chi_squared(counts, probs):
    expected = probs / probs.sum() * counts.sum()
    used = expected > 5
    return float(((counts - expected) ** 2 / expected.clamp(min=1e-9))[used].sum()), int(used.sum()) - 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    counts, probs = draws(SamplingParams(max_tokens=1, temperature=temperature))
    statistic, freedom = chi_squared(counts, probs)
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_top_k_keeps_the_k_best_and_their_proportions():
    counts, probs = draws(SamplingParams(max_tokens=1, top_k=6))
    kept = probs.topk(6).indices
    assert counts.sum() == counts[kept].sum()
    statistic, freedom = chi_squared(counts[kept], probs[kept])
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_top_p_keeps_the_shortest_head_of_at_least_that_mass():
    counts, probs = draws(SamplingParams(max_tokens=1, top_p=0.6))
    ordered, order = probs.sort(descending=True)
    length = int((ordered.cumsum(0) < 0.6).sum()) + 1
    assert set(counts.nonzero()[:, 0].tolist()) == set(order[:length].tolist())


def test_min_p_drops_what_is_unlikely_beside_the_best():
    counts, probs = draws(SamplingParams(max_tokens=1, min_p=0.2))
    allowed = (probs >= 0.2 * probs.max()).nonzero()[:, 0].tolist()
    assert set(counts.nonzero()[:, 0].tolist()) == set(allowed)


def test_stop_tokens_are_not_sampled_before_min_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 10
    early = SamplingParams(max_tokens=9, temperature=0, min_tokens=2)
    assert sample(logits, early).token_ids != [2]
    assert sample(logits, early, outputs=[[5, 6]]).token_ids == [2]
    assert logits[0, 2] == 10, "the model's logits stay as they are"


def test_logit_bias_moves_a_token_up_and_out():
    logits = random_logits(1)
    up = SamplingParams(max_tokens=9, temperature=0, logit_bias=((33, 100.0),))
    assert sample(logits, up).token_ids == [33]
    best = int(logits.argmax())
    out = SamplingParams(max_tokens=9, temperature=0, logit_bias=((best, -100.0),))
    assert sample(logits, out).token_ids != [best]


def test_repetition_counts_prompt_and_answer_and_presence_the_answer_alone():
    logits = torch.zeros(1, VOCAB)
    logits[0, 10], logits[0, 11], logits[0, 12] = 3.0, 2.9, 2.8
    repetition = SamplingParams(max_tokens=9, temperature=0, repetition_penalty=2.0)
    assert sample(logits, repetition, prompts=[[10]], outputs=[[11]]).token_ids == [12]
    presence = SamplingParams(max_tokens=9, temperature=0, presence_penalty=1.0)
    assert sample(logits, presence, prompts=[[10]], outputs=[[11]]).token_ids == [10]
    frequency = SamplingParams(max_tokens=9, temperature=0, frequency_penalty=0.06)
    assert sample(logits, frequency, outputs=[[10, 10]]).token_ids == [11]


def test_logprobs_are_the_models_own_whatever_the_sampling():
    logits = random_logits(2)
    params = SamplingParams(max_tokens=9, temperature=3.0, top_k=3, logprobs=4, logit_bias=((1, 50.0),))
    plain = SamplingParams(max_tokens=9)
    result = sample(logits, params, plain)
    reported = result.logprobs[0]
    expected = torch.log_softmax(logits[0], -1)
    assert reported.token_id == result.token_ids[0]
    assert reported.logprob == pytest.approx(float(expected[reported.token_id]), abs=1e-5)
    assert reported.rank == int((expected > expected[reported.token_id]).sum()) + 1
    assert [token for token, _ in reported.top] == expected.topk(4).indices.tolist()
    assert result.logprobs[1] is None


def test_a_row_of_nan_is_reported_and_the_others_are_sampled_as_ever():
    logits = random_logits(3)
    clean = sample(logits, *[SamplingParams(max_tokens=9)] * 3)
    logits[1] = float("nan")
    result = sample(logits, *[SamplingParams(max_tokens=9)] * 3)
    assert result.is_finite == [True, False, True]
    assert (result.token_ids[0], result.token_ids[2]) == (clean.token_ids[0], clean.token_ids[2])


def test_uniform_numbers_depend_on_seed_and_position_and_spread_evenly():
    seeds = torch.arange(-500, 500)[:, None].expand(1000, 100).contiguous()
    positions = torch.arange(100)[None].expand(1000, 100).contiguous()
    numbers = uniform(seeds, positions)
    assert torch.equal(numbers, uniform(seeds.clone(), positions.clone()))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(numbers.unique()) == numbers.numel()
    counts = torch.histc(numbers.float(), bins=100, min=0, max=1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 99 + 5 * (2 * 99) ** 0.5
