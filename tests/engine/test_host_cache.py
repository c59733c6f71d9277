"""Cached prefixes that move to host memory and back: the same tokens, and fewer of them computed."""

import random

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models import read_config
from testing.engines.handing_over import hand_over
from testing.engines.handing_over import make_engine as make_one_of_two
from testing.engines.handing_over import run as run_decode
from testing.engines.shared_prefixes import answers, run
from wire.errors import ConfigError, SanitizerError

BLOCK = 8
FEW = {"max_num_seqs": 2, "max_batch_tokens": 64, "max_model_len": 256, "block_size": BLOCK}
"""Settings of a device that has room for few starts."""


def settings_of(mode, model_dir, *, role="both", **more):
    """Return settings with the least memory that the configuration allows on the device, and much on the
    host."""
    settings = {**FEW, "cache_mode": mode, **more}
    if mode != "none":
        settings = {"cached_states": 2, "host_cache_bytes": 64 << 20, **settings}
    config = EngineConfig(model_dir, role, device="cpu", **settings)
    return {"cache_memory_bytes": config.demand(read_config(model_dir)).min_bytes, **settings}


def make(mode, model_dir, **more):
    more.setdefault("sanitize", True)
    return Engine(EngineConfig(model_dir, "both", device="cpu", **settings_of(mode, model_dir, **more)))


def tier_of(engine):
    return engine.scheduler.owned.cache.tier


def conversations(num_sessions, num_turns, seed=0):
    """Return prompts, turn by turn: each continues the last one of its session."""
    choose = random.Random(seed)

    def new_tokens(least, most):
        return [choose.randrange(6, 150) for _ in range(choose.randint(least, most))]

    sessions = [new_tokens(20, 60) for _ in range(num_sessions)]
    prompts = []
    for _ in range(num_turns):
        for session in sessions:
            prompts.append(list(session))
            session += new_tokens(5, 40)
    return prompts


def check(model_dir, mode, prompts, **more):
    expected = answers(run(make("none", model_dir, **more), prompts, 2))
    engine = make(mode, model_dir, **more)
    found = run(engine, prompts, 2)
    assert answers(found) == expected
    assert answers(run(engine, prompts, 2)) == expected
    figures = tier_of(engine).figures
    assert figures.promoted > 3
    assert figures.demoted > 0
    assert figures.promoted_tokens > figures.promoted * BLOCK
    assert sum(one.measured.num_cached for one in found) > figures.promoted * BLOCK // 2
    owned = engine.scheduler.owned
    assert owned.cache.num_available_blocks == owned.blocks.capacity
    assert owned.cache.num_available_slots == owned.slots.capacity


@pytest.mark.parametrize(("mode", "k"), [("align", 0), ("all", 3)])
def test_tokens_are_those_of_an_engine_without_a_cache(bundled_model, mode, k):
    more = {"num_speculative": k, "drafter": "ngram" if k else None}
    check(bundled_model, mode, conversations(4, 2, seed=k), **more)


@pytest.mark.parametrize("mode", ["all", pytest.param("align", marks=pytest.mark.exhaustive)])
def test_a_prefill_server_hands_over_what_came_back_from_host_memory(bundled_model, mode):
    prompts = conversations(5, 2, seed=2)
    settings = settings_of(mode, bundled_model, role="prefill", sanitize=True)
    source = make_one_of_two(bundled_model, "prefill", **settings)
    sink = make_one_of_two(bundled_model, "decode", **{**FEW, "sanitize": True})
    expected = answers(run(make("none", bundled_model), prompts, 2))
    for _ in range(2):
        for prompt, answer in zip(prompts, expected, strict=True):
            request = hand_over(source, sink, prompt)
            run_decode(sink)
            assert request.tokens[len(prompt) :][: len(answer)] == answer
    figures = tier_of(source).figures
    assert figures.promoted > 2
    assert source.measures.host_cache is figures


def test_a_prompt_of_which_nothing_would_be_left_to_compute_goes_on_from_a_shorter_start(bundled_model):
    """Its blocks can be read by another server at once, while a GPU still copies them."""
    oldest_goes = {"cache_policy": "lru", "state_block_size": 2 * BLOCK}
    settings = settings_of("all", bundled_model, role="prefill", sanitize=True, **oldest_goes)
    source = make_one_of_two(bundled_model, "prefill", **settings)
    sink = make_one_of_two(bundled_model, "decode", **{**FEW, "sanitize": True})
    choose = random.Random(1)
    prompts = [[choose.randrange(6, 150) for _ in range(6 * BLOCK + 1)] for _ in range(5)]
    for prompt in prompts:
        hand_over(source, sink, prompt)
        run_decode(sink)
    before = source.stats().prefill_tokens
    request = hand_over(source, sink, prompts[0])
    assert source.stats().prefill_tokens - before == 2 * BLOCK
    run_decode(sink)
    assert request.num_output > 0
    assert tier_of(source).figures.promoted == 1


@pytest.mark.parametrize("part", ["block", "state"])
def test_a_start_whose_bytes_changed_in_host_memory_is_found(bundled_model, part):
    prompts = conversations(5, 1, seed=3)
    engine = make("all", bundled_model)
    run(engine, prompts, 1)
    tier = tier_of(engine)
    start = next(iter(tier._starts))
    page = start.page if part == "block" else start.state_pages[0]
    engine.host_pages.memory[page - 1, 0] ^= 1
    with pytest.raises(SanitizerError):
        run(engine, [prompt + prompt for prompt in prompts], 1)


def test_a_cleared_cache_is_empty_on_the_host_too(bundled_model):
    prompts = conversations(5, 1, seed=4)
    engine = make("all", bundled_model)
    run(engine, prompts, 1)
    assert tier_of(engine)._starts
    engine.scheduler.owned.cache.clear()
    again = run(engine, prompts, 1)
    assert [one.measured.num_cached for one in again] == [0] * 5
    assert tier_of(engine).figures.promoted == 0


def test_another_salt_finds_nothing_in_host_memory(bundled_model):
    engine = make("all", bundled_model)
    prompts = conversations(5, 1, seed=5)

    def cached(salt):
        found = run(engine, prompts, 1, cache_salt=salt)
        return sum(one.measured.num_cached for one in found)

    assert (cached("a"), cached("b")) == (0, 0)
    assert cached("a") > 0


@pytest.mark.parametrize(
    ("role", "settings", "message"),
    [
        ("both", {"host_cache_bytes": -1}, "`host_cache_bytes` must be at least 0, got -1"),
        ("decode", {"host_cache_bytes": 1 << 30}, "means nothing for a decode server"),
        ("both", {"host_cache_bytes": 1 << 30, "cache_mode": "none"}, "means nothing in `cache_mode` none"),
    ],
)
def test_host_memory_that_nothing_could_use_is_refused(bundled_model, role, settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(bundled_model, role, device="cpu", **settings)


def test_host_memory_for_less_than_one_start_is_refused(bundled_model):
    with pytest.raises(ConfigError, match="`host_cache_bytes` 100 holds no cached prefix"):
        make("all", bundled_model, host_cache_bytes=100)
