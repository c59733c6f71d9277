"""Every cache mode gives the same tokens as no cache, and a hit saves exactly the computed number of
tokens."""

import random

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from testing.checkpoints.random_checkpoint import DENSE, WITH_MOE, make_checkpoint
from testing.engines.sanitizing import SANITIZE
from testing.engines.shared_prefixes import answers, prompts_with_shared_prefixes, run
from wire.messages.sampling_params import SamplingParams


@pytest.fixture(scope="module", params=["bundled", "dense", "moe"])
def model_dir(request, bundled_model, tmp_path_factory):
    if request.param == "bundled":
        return bundled_model
    shape = {"dense": DENSE, "moe": WITH_MOE}[request.param]
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), shape, seed=3)


def make_engine(model_dir, mode, budget=512, **settings):
    settings = {"max_num_seqs": 32, "cache_memory_bytes": 64 << 20, "sanitize": SANITIZE, **settings}
    if mode == "all":
        settings.setdefault("state_block_size", 32)
    if mode == "learned":
        mode, settings = "all", {**settings, "cache_policy": "value"}
    settings["max_num_seqs"] = min(settings["max_num_seqs"], budget)
    return Engine(
        EngineConfig(model_dir, "both", device="cpu", max_batch_tokens=budget, cache_mode=mode, **settings)
    )


@pytest.mark.parametrize("budget", [16, pytest.param(64, marks=pytest.mark.exhaustive), 512])
@pytest.mark.parametrize("concurrency", [pytest.param(1, marks=pytest.mark.exhaustive), 32])
@pytest.mark.parametrize("mode", ["align", "all", "learned"])
def test_cold_and_warm_caches_give_the_tokens_of_no_cache(model_dir, mode, budget, concurrency):
    prompts = prompts_with_shared_prefixes(17, seed=budget + concurrency)  # 306 over all parameters
    expected = answers(run(make_engine(model_dir, "none"), prompts, 32))
    engine = make_engine(model_dir, mode, budget)
    cold = run(engine, prompts, concurrency)
    warm = run(engine, prompts, concurrency)
    assert answers(cold) == expected
    assert answers(warm) == expected
    assert sum(r.measured.num_cached for r in warm) > sum(r.measured.num_cached for r in cold)
    assert sum(r.measured.num_cached for r in warm) > sum(r.num_prompt for r in warm) // 3


@pytest.mark.parametrize("mode", ["align", "all", "learned"])
def test_a_small_pool_evicts_and_stays_exact(model_dir, mode):
    prompts = prompts_with_shared_prefixes(40, seed=1)
    expected = answers(run(make_engine(model_dir, "none"), prompts, 8))
    engine = make_engine(model_dir, mode, 64, max_num_seqs=4, cached_states=3, max_model_len=256)
    owned = engine.scheduler.owned
    spare = owned.blocks.num_free - 30
    owned.blocks.allocate(spare)  # as if the pool were that much smaller
    assert answers(run(engine, prompts, 4)) == expected
    assert answers(run(engine, prompts, 4)) == expected
    assert owned.cache.num_available_blocks == 30


@pytest.mark.parametrize(
    ("mode", "num_tokens", "cached"),
    [
        ("none", 100, 0),
        ("align", 100, 96),  # the last block boundary below the prompt's end
        ("all", 100, 96),
        ("all", 97, 96),
        ("align", 96, 80),  # one token has to be computed
        ("all", 16, 0),
        ("all", 17, 16),
        ("learned", 100, 96),
        ("learned", 97, 96),
    ],
)
def test_the_same_prompt_again_computes_what_lies_behind_the_last_boundary(
    bundled_model, mode, num_tokens, cached
):
    engine = make_engine(bundled_model, mode)
    prompt = prompts_with_shared_prefixes(1, seed=9)[0] * 10
    run(engine, [prompt[:num_tokens]], 1)
    before = engine.stats().prefill_tokens
    (again,) = run(engine, [prompt[:num_tokens]], 1)
    assert again.measured.num_cached == cached
    assert engine.stats().prefill_tokens - before == num_tokens - cached


@pytest.mark.parametrize("mode", ["align", "all", "learned"])
def test_a_branch_seen_twice_serves_the_third(bundled_model, mode):
    engine = make_engine(bundled_model, mode, **({"state_block_size": 512} if mode == "all" else {}))
    choose = random.Random(2)
    system = [choose.randrange(6, 150) for _ in range(64)]
    turns = [system + [choose.randrange(6, 150) for _ in range(30)] for _ in range(3)]
    first, second, third = (run(engine, [turn], 1)[0] for turn in turns)
    assert (first.measured.num_cached, second.measured.num_cached, third.measured.num_cached) == (0, 0, 64)


@pytest.mark.parametrize("mode", ["align", "all", "learned"])
def test_another_salt_shares_nothing(bundled_model, mode):
    engine = make_engine(bundled_model, mode)
    prompt = prompts_with_shared_prefixes(1)[0] * 5

    def cached(salt):
        request = Request("r", list(prompt), SamplingParams(max_tokens=2, temperature=0), cache_salt=salt)
        engine.add(request)
        while not engine.step().did_nothing:
            pass
        return request.measured.num_cached

    assert cached("a") == 0
    assert cached("b") == 0
    assert cached("") == 0
    assert cached("a") > 0
