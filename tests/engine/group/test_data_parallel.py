"""Ranks that share experts answer like a single rank, and an idle rank's memory stays unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from testing.engines.leading import lead_engine
from testing.engines.lockstep_ranks import (
    cancel,
    forget_prefixes,
    is_untouched,
    num_dummy_steps,
    num_tokens,
    owns_nothing,
    poison,
    ranks,
)
from testing.engines.speculating import assert_nothing_is_owned, assert_same, greedy_asks, sampled_asks, serve
from wire.messages.sampling_params import SamplingParams

NUM_STEPS = 500


@pytest.fixture(scope="module")
def drafting(models):
    """Two ranks that try three drafts a step."""
    with ranks(models["moe"], 2, num_speculative=3, drafter="mtp", cache_mode="all") as group:
        yield group


def long_asks(count, seed, num_tokens=NUM_STEPS):
    """Answers of so many tokens, mixed with short ones: the batch grows and shrinks."""
    asks = greedy_asks(count, seed)
    params = SamplingParams(max_tokens=num_tokens, temperature=0)
    return [replace(asks[0], params=params), replace(asks[-1], params=params), *asks[1:-1]]


def assert_idle_beside(busy, idle, asks, expected, at_least):
    """The idle ranks compute dummy steps while the busy rank works, and their memory does not change."""
    for rank in idle:
        rank.wait_until(owns_nothing, "nothing is owned")
        rank.call(forget_prefixes)
        rank.call(poison)
    before = [rank.call(num_dummy_steps) for rank in idle]
    busy.ask(asks)
    answers = busy.answers()
    assert_same(answers, expected)
    assert not any(set(answer.tokens) == {0} for answer in answers)
    for rank, steps in zip(idle, before, strict=True):
        assert rank.call(num_dummy_steps) - steps >= at_least
        assert rank.call(is_untouched)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_one_rank_is_busy_for_500_steps_beside_idle_ones_and_then_another(engines, models, size):
    with ranks(models["moe"], size, cache_mode="align") as group:
        for i, busy in enumerate((group[0], group[-1])):
            asks = long_asks(5, seed=i)
            expected = engines.plain(models["moe"], asks)
            idle = [rank for rank in group if rank is not busy]
            assert_idle_beside(busy, idle, asks, expected, NUM_STEPS)


def test_a_prompt_of_one_token_is_computed_beside_an_idle_rank_that_has_more_positions(
    engines, models, drafting
):
    """Nobody else's tokens make room for the padding row of the rank that idles."""
    ask = greedy_asks(2, seed=6)[0]
    assert len(ask.prompt) == 1
    busy, idle = drafting
    assert_idle_beside(busy, [idle], [ask], engines.plain(models["moe"], [ask]), 3)


def test_a_rank_whose_requests_have_left_idles_on_null_entries_alone_vllm_38270(engines, models, drafting):
    """Its rows, blocks and slots are named by nothing any more; requests that come later are exact."""
    first, second = greedy_asks(6, seed=3), greedy_asks(6, seed=4)
    asks = long_asks(3, seed=5, num_tokens=60)
    expected = [engines.plain(models["moe"], one) for one in (first, second, asks)]
    stays, leaves = drafting
    leaves.ask(first)
    assert_same(leaves.answers(), expected[0])
    leaves.ask(first)
    leaves.wait_until(some_tokens, "some tokens have come")
    leaves.call(cancel, [str(i) for i in range(len(first))])
    leaves.answers()
    assert_idle_beside(stays, [leaves], asks, expected[2], 15)
    leaves.ask(second)
    assert_same(leaves.answers(), expected[1])


def some_tokens(inside):
    return num_tokens(inside) > 3


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {"num_speculative": 3, "drafter": "mtp", "cache_mode": "all", "steps_ahead": 1}),
        pytest.param(
            *(2, {"num_speculative": 1, "drafter": "ngram", "cache_mode": "none", "sanitize": True}),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            4, {"num_speculative": 2, "drafter": "mtp", "sanitize": True}, marks=pytest.mark.exhaustive
        ),
    ],
)
def test_ranks_with_batches_of_different_sizes_answer_exactly(engines, models, size, settings):
    """Prompts run in the same step as other requests' decode rows; chunks, drafts and samples are each rank's
    own."""
    with ranks(models["moe"], size, max_batch_tokens=96, **settings) as group:
        asked = []
        for i, rank in enumerate(group):
            asks = [*greedy_asks(2 + 5 * i, seed=10 + i), *sampled_asks(3 + 3 * i, seed=20 + i)]
            rank.ask(asks)
            asked.append(asks)
        for rank, asks in zip(group, asked, strict=True):
            assert_same(rank.answers(), engines.plain(models["moe"], asks))
            rank.wait_until(owns_nothing, "nothing is owned")


@pytest.mark.exhaustive
def test_servers_of_two_tensor_parallel_ranks_share_experts_among_all_four(engines, models):
    """First one server computes and the other is idle, then both have work. Each server sums its own ranks'
    parts."""
    settings = {"tensor_parallel": 2, "num_speculative": 2, "drafter": "mtp", "sanitize": True}
    asks = [greedy_asks(3, seed=30), [*greedy_asks(2, seed=31), *sampled_asks(4, seed=32)]]
    expected = [engines.plain(models["moe"], one) for one in asks]
    with ranks(models["moe"], 2, max_batch_tokens=96, **settings) as group:
        busy, idle = group
        before = idle.call(num_dummy_steps)
        busy.ask(asks[0])
        assert_same(busy.answers(), expected[0])
        assert idle.call(num_dummy_steps) > before
        for rank, one in zip(group, asks, strict=True):
            rank.ask(one)
        for rank, answers in zip(group, expected, strict=True):
            assert_same(rank.answers(), answers)
            rank.wait_until(owns_nothing, "nothing is owned")


def test_tensor_parallel_ranks_of_one_server_share_whole_experts(engines, models):
    asks = [*greedy_asks(3, seed=33), *sampled_asks(2, seed=34)]
    expected = engines.plain(models["moe"], asks)
    with lead_engine(models["moe"], 2, expert_parallel=True, num_speculative=2, drafter="mtp") as engine:
        assert_same(serve(engine, asks, per_step=3), expected)
        assert_nothing_is_owned(engine)
