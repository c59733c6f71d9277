"""Several ranks answer like one rank. Real processes share a model, its KV heads and its Mamba heads."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
from llguidance import LLMatcher

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models import read_config
from engine.parallel.tensor_parallel import TensorParallel
from engine.ranks.lead import LeadEngine
from engine.ranks.process import work
from engine.ranks.processes import RankProcesses
from engine.request import Request
from testing.checkpoints.random_checkpoint import EOS_TOKEN_ID
from testing.conditions import TIMEOUT_S, wait_until
from testing.engines.leading import lead_engine
from testing.engines.speculating import (
    assert_nothing_is_owned,
    assert_same,
    greedy_asks,
    sampled_asks,
    serve,
    short_asks,
)
from wire.errors import GroupLostError, InvalidRequestError
from wire.messages.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("model", "size", "mode", "k", "drafter"),
    [
        pytest.param("bundled", 4, "align", 1, "mtp", marks=pytest.mark.exhaustive),
        ("dense", 2, "none", 2, "ngram"),
        ("moe", 2, "all", 3, "mtp"),
    ],
)
def test_answers_of_several_ranks_equal_those_of_one(engines, models, model, size, mode, k, drafter):
    asks = [*greedy_asks(2, seed=1), *sampled_asks(2, seed=1), *short_asks(2, seed=2)]
    expected = engines.plain(models[model], asks)
    with lead_engine(models[model], size, cache_mode=mode, num_speculative=k, drafter=drafter) as engine:
        assert_same(serve(engine, asks, per_step=3), expected)
        assert_nothing_is_owned(engine)


def test_recorded_steps_of_two_ranks_answer_like_one(engines, models):
    asks = [*greedy_asks(2, seed=1), *sampled_asks(2, seed=1), *short_asks(2, seed=2)]
    expected = engines.plain(models["dense"], asks)
    with lead_engine(models["dense"], 2, num_speculative=2, sanitize=False) as engine:
        assert engine.own._runner._program._recorded is not None
        assert_same(serve(engine, asks, per_step=3), expected)


def test_ranks_agree_on_who_is_refused_cancelled_or_preempted(engines, models):
    """Each decides for itself: a decision that differed would leave one waiting for the others."""
    asks = short_asks(8, seed=3)
    words = LLMatcher.grammar_from_regex("([a-z]| ){20,40}")
    for i in (4, 5):  # each rank follows their grammar
        asks[i] = replace(
            asks[i], params=replace(asks[i].params, grammar=words), stop=frozenset([EOS_TOKEN_ID])
        )
    expected = engines.plain(models["dense"], asks)
    assert expected[4].said != expected[5].said
    sizes = {"max_num_seqs": 8, "max_model_len": 72, "cache_mode": "none"}
    config = EngineConfig(models["dense"], "both", device="cpu", tensor_parallel=2, **sizes)
    demand = config.demand(read_config(models["dense"]), TensorParallel(0, 2))
    with lead_engine(models["dense"], 2, cache_memory_bytes=demand.min_bytes, **sizes) as engine:
        with pytest.raises(InvalidRequestError, match="vocabulary"):
            engine.add(Request("bad", [1, 10_000], SamplingParams(max_tokens=2)))
        answers = serve(engine, asks, cancels={2: 3})
        assert [a.said for i, a in enumerate(answers) if i != 2] == [
            e.said for i, e in enumerate(expected) if i != 2
        ]
        assert engine.own.scheduler.num_preemptions > 0
        assert_nothing_is_owned(engine)


@contextmanager
def failing_ranks(model_dir, failures):
    config = EngineConfig(
        model_dir, "both", device="cpu", tensor_parallel=2, cache_memory_bytes=64 << 20, num_threads=1
    )
    ranks = RankProcesses(config, work, on_fatal=failures.append)
    try:
        yield LeadEngine(Engine(config, ranks.join().tp), ranks.tell), ranks
    finally:
        ranks.stop()


def test_a_rank_that_ends_ends_the_server(models):
    failures = []
    with failing_ranks(models["dense"], failures) as (engine, ranks):
        assert engine.step().did_nothing
        os.kill(ranks.pids[0], signal.SIGKILL)
        wait_until(lambda: failures, "the failure is reported")
        assert "rank 1 has ended with exit code -9" in str(failures[0])


def test_a_rank_that_ends_within_a_step_ends_the_others_step(models):
    with failing_ranks(models["dense"], []) as (engine, ranks):
        engine.add(Request("a", [1, 2, 3], SamplingParams(max_tokens=8)))
        os.kill(ranks.pids[0], signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            step = pool.submit(engine.step)
            assert not step.done()
            os.kill(ranks.pids[0], signal.SIGKILL)
            with pytest.raises(GroupLostError, match="another rank has ended"):
                step.result(timeout=TIMEOUT_S)


def test_a_damaged_state_on_one_rank_fails_its_request_on_all(engines, models):
    asks = greedy_asks(3, seed=4)
    expected = engines.plain(models["dense"], asks)
    with lead_engine(models["dense"], 2, cache_mode="none") as engine:

        def damage(answers):
            request = answers[1].request
            if len(answers[1].tokens) == 2 and request.finish_reason is None:
                engine.caches.state[request.memory.state_slot].fill_(1)

        answers = serve(engine, asks, on_step=damage)
        assert answers[1].finish_reason == "error"
        assert [answers[i].said for i in (0, 2)] == [expected[i].said for i in (0, 2)]
        assert_nothing_is_owned(engine)
