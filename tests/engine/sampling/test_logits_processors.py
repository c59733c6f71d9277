"""Bias, forbidden stop tokens and penalties, compared with plain rules for one row and one token at a
time."""

import random

import pytest
import torch

from engine.request import Request
from engine.sampling.sampler import Sampler
from engine.sampling.sampling_table import SamplingNeeds, SamplingTable
from wire.messages.sampling_params import SamplingParams

VOCAB = 50
CPU = torch.device("cpu")


def processed_by_rule(row, request, fed):
    """The rules as they are written down; ``fed`` are the drafts up to this position."""
    params, row = request.params, row.clone()
    tokens = request.tokens + fed
    answer = tokens[request.num_prompt :]
    for token_id, bias in params.logit_bias:
        row[token_id] += bias
    if len(answer) < params.min_tokens:
        row[list(request.stop_token_ids)] = -torch.inf
    for token_id in set(tokens):
        row[token_id] *= 1 / params.repetition_penalty if row[token_id] > 0 else params.repetition_penalty
    for token_id in set(answer):
        row[token_id] -= params.presence_penalty + params.frequency_penalty * answer.count(token_id)
    return row


def filled(requests, max_stop_ids=5):
    table = SamplingTable(len(requests), VOCAB, CPU, max_stop_ids)
    for row, request in enumerate(requests):
        request.row = row
        table.fill(request)
    return table


def random_request(rng, name):
    def some(value, default):
        return value if rng.random() < 0.6 else default

    params = SamplingParams(
        max_tokens=30,
        temperature=0,
        repetition_penalty=some(rng.uniform(0.5, 2), 1.0),
        presence_penalty=some(rng.uniform(-2, 2), 0.0),
        frequency_penalty=some(rng.uniform(-2, 2), 0.0),
        logit_bias=some(tuple((rng.randrange(VOCAB), rng.uniform(-9, 9)) for _ in range(4)), ()),
        min_tokens=some(rng.randrange(8), 0),
    )
    stop = frozenset(rng.sample(range(VOCAB), rng.randrange(5)))
    request = Request(name, [rng.randrange(VOCAB) for _ in range(6)], params, stop_token_ids=stop)
    request.tokens += [rng.randrange(VOCAB) for _ in range(rng.randrange(7))]
    return request


@pytest.mark.parametrize("num_positions", [1, 4])
@pytest.mark.parametrize("seed", range(6))
def test_every_position_follows_the_rules_for_the_tokens_before_it(seed, num_positions):
    rng = random.Random(seed)
    requests = [random_request(rng, str(i)) for i in range(12)]
    table = filled(requests)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(12, num_positions, VOCAB, generator=generator) * 4
    untouched = logits.clone()
    input_ids = torch.randint(0, VOCAB, (12, num_positions), generator=generator)
    input_ids[:, 0] = torch.tensor([request.tokens[-1] for request in requests])
    positions = torch.tensor([[len(r.tokens) - 1] for r in requests]) + torch.arange(num_positions)
    order = torch.randperm(12, generator=generator)
    token_ids, _ = Sampler(table).sample(
        logits[order], order, positions[order], input_ids[order], SamplingNeeds(processed=True)
    )
    for place, which in enumerate(order.tolist()):
        for i in range(num_positions):
            fed = input_ids[which, 1 : i + 1].tolist()
            expected = processed_by_rule(logits[which, i], requests[which], fed)
            chosen = float(expected[token_ids[place, i]])
            assert chosen == pytest.approx(float(expected.max()), abs=1e-5)
    assert torch.equal(logits, untouched), "the model's logits stay as they are"


def best(request, logits):
    """The greedy token of one request alone."""
    table = filled([request])
    token_ids, _ = Sampler(table).sample(
        logits[None, None],
        torch.tensor([0]),
        torch.tensor([[len(request.tokens) - 1]]),
        torch.tensor([request.tokens[-1:]]),
        table.needs([request]),
    )
    return int(token_ids)


def greedy(prompt=(1,), answer=(), stop=(), **params):
    params = SamplingParams(max_tokens=9, temperature=0, **params)
    request = Request("r", list(prompt), params, stop_token_ids=frozenset(stop))
    request.tokens += answer
    return request


def test_stop_tokens_are_not_sampled_before_min_tokens():
    logits = torch.zeros(VOCAB)
    logits[2] = 10
    assert best(greedy(stop=[2], min_tokens=2), logits) != 2
    assert best(greedy(stop=[2], min_tokens=2, answer=[5]), logits) != 2
    assert best(greedy(stop=[2], min_tokens=2, answer=[5, 6]), logits) == 2


def test_logit_bias_moves_a_token_up_and_out():
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
    first = int(logits.argmax())
    assert best(greedy(logit_bias=((33, 100.0),)), logits) == 33
    assert best(greedy(logit_bias=((first, -100.0),)), logits) != first


def test_repetition_counts_prompt_and_answer_and_presence_the_answer_alone():
    logits = torch.zeros(VOCAB)
    logits[10], logits[11], logits[12] = 3.0, 2.9, 2.8
    assert best(greedy([10], [11], repetition_penalty=2.0), logits) == 12
    assert best(greedy([10], [11], presence_penalty=1.0), logits) == 10
    assert best(greedy([1], [10, 10], frequency_penalty=0.06), logits) == 11


def test_a_row_without_penalties_keeps_its_bits_in_a_penalised_company():
    plain = Request("plain", [1, 2], SamplingParams(max_tokens=4), seed=5)
    table = filled([plain, greedy(repetition_penalty=1.5, min_tokens=3, stop=[0], logit_bias=((1, 1.0),))])
    logits = torch.randn(3, 4, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0, 2, 7] = -torch.inf
    seen = []
    for needs in (SamplingNeeds(random=True), SamplingNeeds(random=True, processed=True)):
        sampler, rows = Sampler(table), torch.tensor([0, 1, 2])
        positions = torch.arange(4).expand(3, 4)
        seen.append(sampler.sample(logits, rows, positions, positions + 9, needs)[0][0].tolist())
        results = torch.full((3, 7), 9)
        forced = torch.full((3,), -1)
        sampler.commit(rows, results, torch.tensor([4, 1, 0]), needs, forced=forced)
        seen.append(sampler.sample(logits, rows, positions, positions + 9, needs)[0][0].tolist())
    assert seen == [seen[0]] * 4


def test_commit_counts_the_gained_tokens_of_the_answer_and_no_others():
    requests = [greedy(prompt=[1], frequency_penalty=1.0) for _ in range(4)]
    table = filled(requests)
    results = torch.zeros(4, 7, dtype=torch.int64)
    results[0] = torch.tensor([3, 1, 3, 7, 7, 8, 0])
    results[1] = torch.tensor([1, 1, 0, 5, 0, 0, 0])  # a prompt token that was fed on its own
    results[2] = torch.tensor([1, 1, 3, 9, 0, 0, 0])
    accepted = torch.tensor([3, 1, 1, 0], dtype=torch.int32)
    rows, forced = torch.tensor([3, 0, 1, 4]), torch.tensor([-1, 5, -1, -1])
    Sampler(table).commit(rows, results, accepted, table.needs(requests), forced=forced)
    expected = torch.zeros(5, VOCAB, dtype=torch.int32)
    expected[3, 7], expected[3, 8], expected[1, 9] = 2, 1, 1
    assert torch.equal(table.tokens.counts, expected)


def test_penalty_tables_cost_no_memory_before_a_request_needs_them():
    table = SamplingTable(2, VOCAB, CPU, max_stop_ids=1)
    plain = Request("plain", [1], SamplingParams(max_tokens=4, min_tokens=2))
    plain.row = 0
    table.fill(plain)
    assert table._tokens is None
    request = greedy(presence_penalty=1.0)
    request.row = 1
    table.fill(request)
    address = table.tokens.counts.data_ptr()
    table.clear(1)
    table.fill(request)
    assert table.tokens.counts.data_ptr() == address
