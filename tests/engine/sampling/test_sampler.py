"""Sampling follows each row's own parameters, whatever else is in the batch and whatever was drafted."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from engine.request import Request
from engine.sampling.logprobs import TOKENS_AT_ONCE, LogprobTensors, prompt_logprobs
from engine.sampling.sampler import Sampler
from engine.sampling.sampling_table import SamplingNeeds, SamplingTable
from wire.messages.sampling_params import SamplingParams

VOCAB = 50
CPU = torch.device("cpu")
EVERYTHING = SamplingNeeds(random=True, filtered=True, processed=True)


def sampling_request(row, params, *, prompt=(1,), output=(), seed=7, stop=(2,)):
    request = Request(f"r{row}", list(prompt), params, stop_token_ids=frozenset(stop), seed=seed)
    request.tokens += output
    request.row = row
    return request


@dataclass
class Sampled:
    token_ids: list[int]
    is_finite: list[bool]


def sample(logits, *params, prompts=None, outputs=None, seeds=None, needs=None):
    """One token for each request, from ``logits`` ``[R, V]``."""
    table = SamplingTable(len(params), VOCAB, CPU, max_stop_ids=4)
    requests = [
        sampling_request(
            i,
            one,
            prompt=prompts[i] if prompts else [1],
            output=outputs[i] if outputs else [],
            seed=seeds[i] if seeds else 7,
        )
        for i, one in enumerate(params)
    ]
    for request in requests:
        table.fill(request)
    token_ids, is_finite = Sampler(table).sample(
        logits[:, None],
        torch.arange(len(params)),
        torch.tensor([[len(request.tokens) - 1] for request in requests]),
        torch.tensor([request.tokens[-1:] for request in requests]),
        table.needs(requests) if needs is None else needs,
    )
    return Sampled(token_ids[:, 0].tolist(), is_finite[:, 0].tolist())


def random_logits(*shape, seed=0):
    return torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def kinds():
    return [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, top_k=5),
        SamplingParams(max_tokens=9, temperature=0),
        SamplingParams(max_tokens=9, top_p=0.7, temperature=1.7),
        SamplingParams(max_tokens=9, min_p=0.1),
        SamplingParams(max_tokens=9, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(max_tokens=9, temperature=0, logit_bias=((5, 3.0),), min_tokens=4),
    ]


def test_greedy_takes_the_best_token():
    logits = random_logits(3)
    params = [SamplingParams(max_tokens=9, temperature=0)] * 3
    assert sample(logits, *params).token_ids == logits.argmax(-1).tolist()


def test_a_draw_is_the_same_alone_and_in_any_company():
    params = kinds()
    logits = random_logits(len(params))
    seeds = list(range(len(params)))
    together = sample(logits, *params, seeds=seeds).token_ids
    alone = [sample(logits[i : i + 1], params[i], seeds=[seeds[i]]).token_ids[0] for i in range(len(params))]
    assert together == alone


@pytest.mark.parametrize("which", range(len(kinds())))
def test_needs_of_others_change_nothing(which):
    params, logits = kinds()[which], random_logits(1, seed=which)
    own = [sample(logits, params, seeds=[seed]).token_ids for seed in range(40)]
    assert own == [sample(logits, params, seeds=[seed], needs=EVERYTHING).token_ids for seed in range(40)]


@pytest.mark.parametrize("which", range(5))
def test_several_positions_sample_what_one_at_a_time_does(which):
    table = SamplingTable(3, VOCAB, CPU, max_stop_ids=1)
    requests = [sampling_request(row, kinds()[which], seed=row) for row in range(3)]
    for request in requests:
        table.fill(request)
    sampler, needs, rows = Sampler(table), table.needs(requests), torch.tensor([2, 0, 3, 1])
    logits, input_ids = random_logits(4, 4), torch.randint(0, VOCAB, (4, 4))
    positions = torch.tensor([[9], [0], [0], [40]]) + torch.arange(4)
    token_ids, _ = sampler.sample(logits, rows, positions, input_ids, needs)
    for i in range(4):
        at = slice(i, i + 1)
        one, _ = sampler.sample(logits[:, at], rows, positions[:, at], input_ids[:, at], needs)
        assert one[:, 0].tolist() == token_ids[:, i].tolist()
        drafted = sampler.draft(logits[:, i], rows, positions[:, i] + 1, needs)
        assert drafted.tolist() == token_ids[:, i].tolist(), "a perfect drafter is always right"


def draws(params, count=20_000):
    """Frequencies of ``count`` draws of one distribution: one row, many positions."""
    logits = random_logits(1, seed=3)
    table = SamplingTable(1, VOCAB, CPU, max_stop_ids=1)
    request = sampling_request(0, params)
    table.fill(request)
    drawn, _ = Sampler(table).sample(
        logits.expand(1, count, VOCAB),
        torch.tensor([0]),
        torch.arange(count)[None],
        torch.zeros(1, count, dtype=torch.int64),
        table.needs([request]),
    )
    probs = torch.softmax(logits[0].double() / params.temperature, -1)
    return torch.bincount(drawn[0], minlength=VOCAB).double(), probs


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


def test_top_k_beyond_the_vocabulary_keeps_all():
    everything, _ = draws(SamplingParams(max_tokens=1, top_k=VOCAB))
    more, _ = draws(SamplingParams(max_tokens=1, top_k=1 << 31))
    assert torch.equal(everything, more)


def test_top_p_keeps_the_shortest_head_of_at_least_that_mass():
    counts, probs = draws(SamplingParams(max_tokens=1, top_p=0.6))
    ordered, order = probs.sort(descending=True)
    length = int((ordered.cumsum(0) < 0.6).sum()) + 1
    assert set(counts.nonzero()[:, 0].tolist()) == set(order[:length].tolist())


def test_top_p_is_a_share_of_what_top_k_leaves():
    counts, probs = draws(SamplingParams(max_tokens=1, top_k=8, top_p=0.7))
    ordered, order = probs.sort(descending=True)
    length = int((ordered.cumsum(0) < 0.7 * ordered[:8].sum()).sum()) + 1
    assert length < 8
    assert set(counts.nonzero()[:, 0].tolist()) == set(order[:length].tolist())


def test_a_filter_takes_the_lower_of_equal_tokens_first():
    logits = torch.zeros(1, VOCAB)
    params = SamplingParams(max_tokens=9, top_k=3)
    drawn = {sample(logits, params, seeds=[seed]).token_ids[0] for seed in range(200)}
    assert drawn == {0, 1, 2}


def test_min_p_drops_what_is_unlikely_beside_the_best():
    counts, probs = draws(SamplingParams(max_tokens=1, min_p=0.2))
    allowed = (probs >= 0.2 * probs.max()).nonzero()[:, 0].tolist()
    assert set(counts.nonzero()[:, 0].tolist()) == set(allowed)


def test_a_filter_counts_what_min_p_leaves():
    """Both cut at once: of the 20 best at most 0.7 of the mass that is not below 0.1 of the best."""
    counts, probs = draws(SamplingParams(max_tokens=1, min_p=0.1, top_k=20, top_p=0.7))
    ordered, order = probs.sort(descending=True)
    allowed = ordered[:20][ordered[:20] >= 0.1 * ordered[0]]
    length = int((allowed.cumsum(0) < 0.7 * allowed.sum()).sum()) + 1
    assert 1 < length < len(allowed) < 20
    assert set(counts.nonzero()[:, 0].tolist()) == set(order[:length].tolist())


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 40}, {"min_p": 0.3}])
def test_a_token_that_cannot_be_sampled_never_is(filters):
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, [4, 9, 11]] = torch.tensor([0.3, 1.7, 1.2])
    params = SamplingParams(max_tokens=9, **filters)
    drawn = {sample(logits, params, seeds=[seed]).token_ids[0] for seed in range(99)}
    assert drawn == ({9, 11} if "min_p" in filters or "top_p" in filters else {4, 9, 11})


def test_a_row_of_nan_is_reported_and_the_others_are_sampled_as_ever():
    logits = random_logits(3)
    for params in ([SamplingParams(max_tokens=9)] * 3, [SamplingParams(max_tokens=9, top_p=0.8)] * 3):
        clean = sample(logits, *params)
        broken = logits.clone()
        broken[1] = float("nan")
        result = sample(broken, *params)
        assert result.is_finite == [True, False, True]
        assert (result.token_ids[0], result.token_ids[2]) == (clean.token_ids[0], clean.token_ids[2])
        assert 0 <= result.token_ids[1] < VOCAB


def test_infinite_logits_are_reported_of_their_position_alone():
    table = SamplingTable(1, VOCAB, CPU, max_stop_ids=1)
    logits = random_logits(1, 3)
    logits[0, 1, 4] = torch.inf
    zeros = torch.zeros(1, 3, dtype=torch.int64)
    _, is_finite = Sampler(table).sample(logits, torch.tensor([0]), zeros, zeros, SamplingNeeds())
    assert is_finite.tolist() == [[True, False, True]]


def test_needs_name_what_some_request_asks_for():
    table = SamplingTable(8, VOCAB, CPU, max_stop_ids=1)
    requests = [sampling_request(row, params) for row, params in enumerate(kinds())]
    for request in requests:
        table.fill(request)
    assert table.needs([requests[2]]) == SamplingNeeds()
    assert table.needs([requests[0], requests[4]]) == SamplingNeeds(random=True, filtered=True)
    assert table.needs([requests[3]]) == SamplingNeeds(random=True, filtered=True)
    assert table.needs([requests[6]]) == SamplingNeeds(processed=True)
    assert table.needs(requests) == EVERYTHING
    prefill_only = sampling_request(7, None)
    table.fill(prefill_only)
    assert table.needs([prefill_only]) == SamplingNeeds()


def every_tensor(table):
    names = ("counts", "in_prompt", "bias")
    tensors = [getattr(table.tokens, name) for name in names]
    columns = table.gather(torch.arange(table.num_rows + 1))
    return [*tensors, table.stop_ids, *vars(columns).values()]


def test_a_cleared_row_is_as_fresh():
    table = SamplingTable(2, VOCAB, CPU, max_stop_ids=3)
    params = SamplingParams(
        max_tokens=9,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        frequency_penalty=1.0,
        min_tokens=2,
        logit_bias=((4, 2.0),),
    )
    request = sampling_request(1, params, output=(8, 9), seed=11)
    table.fill(request)
    assert table.tokens.counts[1].sum() == 2
    table.clear(1)
    fresh = SamplingTable(2, VOCAB, CPU, max_stop_ids=3)
    assert all(torch.equal(a, b) for a, b in zip(every_tensor(table), every_tensor(fresh), strict=True))
    assert table.needs([request]) == SamplingNeeds()


def test_stop_ids_are_padded_and_those_outside_the_vocabulary_left_out():
    table = SamplingTable(2, VOCAB, CPU, max_stop_ids=3)
    table.fill(sampling_request(0, SamplingParams(max_tokens=3), stop=(9, VOCAB, 4)))
    assert table.stop_ids.tolist() == [[4, 9, -1], [-1] * 3, [-1] * 3]
    with pytest.raises(ValueError, match="4 stop token ids"):
        table.fill(sampling_request(0, SamplingParams(max_tokens=3), stop=(1, 2, 3, 4)))


def test_logprobs_are_of_the_logits_given_with_rank_and_best_alternatives():
    logits = random_logits(2)
    expected = torch.log_softmax(logits, -1)
    token_ids = torch.tensor([17, int(logits[1].argmax())])

    def found(num_top):
        return LogprobTensors.compute(logits, token_ids, num_top).start_copy().read()

    first, second = found(4)
    assert first.token_id == 17
    assert first.logprob == pytest.approx(float(expected[0, 17]), abs=1e-5)
    assert first.rank == int((expected[0] > expected[0, 17]).sum()) + 1
    assert [token for token, _ in first.top] == expected[0].topk(4).indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(expected[0].topk(4).values.tolist(), abs=1e-5)
    assert second.rank == 1
    assert [one.top for one in found(0)] == [()] * 2
    assert [len(one.top) for one in found(99)] == [VOCAB] * 2


def test_prompt_logprobs_are_one_a_target_however_many_parts_they_take():
    class Model:
        def logits(self, hidden):
            assert len(hidden) <= TOKENS_AT_ONCE
            return hidden

    hidden = random_logits(2 * TOKENS_AT_ONCE + 3)
    targets = torch.randint(0, VOCAB, (len(hidden),)).tolist()
    found = prompt_logprobs(Model(), hidden, targets, 2).read()
    expected = torch.log_softmax(hidden, -1)
    assert [one.token_id for one in found] == targets
    assert np.allclose(
        [one.logprob for one in found], expected[torch.arange(len(targets)), targets], atol=1e-5
    )
    assert all(len(one.top) == 2 for one in found)
