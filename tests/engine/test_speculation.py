"""With speculation the answers are the same tokens: whatever drafts, however many, in whatever company."""

import random
from dataclasses import dataclass

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from tests.checkpoints import DENSE_WITH_MTP, MOE_WITH_MTP, make_checkpoint
from tests.engine.sanitizing import SANITIZE
from tests.engine.test_cache_modes import prompts_with_shared_prefixes
from wire.sampling_params import SamplingParams

MODES = ["none", "align", "all"]
DRAFTERS = ["mtp", "ngram"]


@pytest.fixture(scope="module", params=["bundled", "dense", "moe"])
def model_dir(request, bundled_model, tmp_path_factory):
    if request.param == "bundled":
        return bundled_model
    shape = {"dense": DENSE_WITH_MTP, "moe": MOE_WITH_MTP}[request.param]
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), shape, seed=5)


def make_engine(model_dir, mode="all", k=0, drafter=None, **settings):
    settings = {"max_num_seqs": 32, "cache_memory_bytes": 64 << 20, "sanitize": SANITIZE, **settings}
    if mode == "all":
        settings.setdefault("state_block_size", 16)
    settings.setdefault("max_batch_tokens", 256)
    return Engine(
        EngineConfig(
            model_dir,
            "both",
            device="cpu",
            cache_mode=mode,
            num_speculative=k,
            drafter=drafter if k else None,
            **settings,
        )
    )


def prompts_that_repeat(count, seed):
    """Shared beginnings, and some prompts that say the same thing again: look-up finds something there."""
    choose = random.Random(seed)
    prompts = prompts_with_shared_prefixes(count, seed)
    for prompt in prompts[::3]:
        phrase = [choose.randrange(6, 150) for _ in range(choose.randint(3, 9))]
        prompt += phrase * choose.randint(2, 4)
    return prompts


def run(engine, prompts, concurrency=32, *, num_tokens=24, cancels=(), **params):
    """Answers in order. Requests join as others leave; those in ``cancels`` leave when they have begun."""
    requests = [
        Request(str(i), list(prompt), SamplingParams(max_tokens=num_tokens, **params), seed=i)
        for i, prompt in enumerate(prompts)
    ]
    waiting, active = list(reversed(requests)), 0
    while waiting or active:
        while waiting and active < concurrency:
            engine.add(waiting.pop())
            active += 1
        for output in engine.step().outputs:
            assert output.error is None, output.error
            active -= output.finish_reason is not None
            if int(output.request_id) in cancels and output.finish_reason is None:
                active -= engine.cancel(output.request_id) is not None
    return requests


def answers(requests):
    return [request.tokens[request.num_prompt :] for request in requests]


def assert_nothing_is_owned(engine):
    while not engine.step().did_nothing:
        pass
    owned = engine.scheduler.owned
    owned.cache.clear()
    assert owned.blocks.num_free == owned.blocks.capacity
    assert owned.slots.num_free == owned.slots.capacity
    assert not engine._runner.state.active.any()


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("mode", MODES)
def test_greedy_answers_equal_those_without_speculation(model_dir, mode, k, drafter):
    prompts = prompts_that_repeat(10, seed=k)  # 720 requests over all parameters, twice each
    expected = answers(run(make_engine(model_dir, "none"), prompts, temperature=0))
    engine = make_engine(model_dir, mode, k, drafter)
    assert answers(run(engine, prompts, 32, temperature=0)) == expected
    assert answers(run(engine, prompts, 1 if k == 3 else 4, temperature=0)) == expected
    assert_nothing_is_owned(engine)
