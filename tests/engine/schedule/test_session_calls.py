"""Sessions on a real engine: the same tokens, whatever is retained, released or brought back early."""

import random

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models import read_config
from engine.parallel.tensor_parallel import ALONE, TensorParallel
from testing.checkpoints.random_checkpoint import DENSE, make_checkpoint
from testing.engines.leading import lead_engine, own
from testing.engines.shared_prefixes import answers, run
from wire.messages.purge import PurgePrefixes
from wire.messages.sessions import NAME_BYTES, TendSession

BLOCK = 8
SESSION = "a" * 2 * NAME_BYTES
OTHER = "b" * 2 * NAME_BYTES


def settings_of(model_dir, tp=ALONE, **more):
    """Return settings of a device that has room for few starts, and much host memory."""
    settings = {"max_num_seqs": 2, "max_batch_tokens": 64, "max_model_len": 256, "block_size": BLOCK}
    settings |= {"cached_states": 2, "host_cache_bytes": 64 << 20, "cache_policy": "lru", **more}
    config = EngineConfig(model_dir, "both", device="cpu", **settings)
    return {"cache_memory_bytes": config.demand(read_config(model_dir), tp).min_bytes, **settings}


def make(model_dir, **more):
    settings = {"sanitize": True, **settings_of(model_dir, **more)}
    return Engine(EngineConfig(model_dir, "both", device="cpu", **settings))


def prompts_of(num, length, seed):
    choose = random.Random(seed)
    return [[choose.randrange(6, 150) for _ in range(length)] for _ in range(num)]


def converse(engine):
    """Runs a session of three turns among other prompts. Before each turn its start comes back early. Returns
    the answers, and for each turn what was cached, and what had come back by then and after it."""
    (turn,), told, found = prompts_of(1, 60, seed=1), [], []
    figures = own(engine).scheduler.owned.cache.tier.figures
    for number in range(3):
        news = engine.tend(TendSession(SESSION, "prefetch"))
        assert news.num_starts == (number > 0)
        before = figures.promoted
        (request,) = run(engine, [turn], 1, session=SESSION)
        found += answers([request])
        told.append((request.measured.num_cached, before, figures.promoted))
        assert engine.tend(TendSession(SESSION, "retain", "alice")).num_starts >= 1
        found += answers(run(engine, prompts_of(6, 40, seed=2 + number), 2, session=OTHER))
        turn = request.tokens + prompts_of(1, 12, seed=9)[0]
    assert engine.tend(TendSession(SESSION, "release")).num_starts >= 1
    return found, told


@pytest.fixture
def expected(bundled_model):
    """The same answers of an engine without a cache."""
    settings = {"cache_mode": "none", "cached_states": None, "host_cache_bytes": 0}
    found, _ = converse_without_sessions(make(bundled_model, **settings))
    return found


def converse_without_sessions(engine):
    (turn,), found = prompts_of(1, 60, seed=1), []
    for number in range(3):
        (request,) = run(engine, [turn], 1)
        found += answers([request])
        found += answers(run(engine, prompts_of(6, 40, seed=2 + number), 2))
        turn = request.tokens + prompts_of(1, 12, seed=9)[0]
    return found, []


def test_a_turn_whose_start_came_back_early_computes_as_little_and_says_the_same(bundled_model, expected):
    found, told = converse(make(bundled_model))
    assert found == expected
    (first, *_), *later = told
    assert first == 0
    for num_cached, before, after in later:
        assert num_cached >= 56
        assert before >= 1
        assert after == before, "the request itself had nothing to bring back"


@pytest.mark.exhaustive
def test_ranks_tend_sessions_and_purge_alike(tmp_path):
    model_dir = make_checkpoint(tmp_path / "dense", DENSE, seed=3)
    plain = {"cache_mode": "none", "cached_states": None, "host_cache_bytes": 0}
    expected, _ = converse_without_sessions(make(model_dir, **plain))
    with lead_engine(model_dir, 2, **settings_of(model_dir, tp=TensorParallel(0, 2))) as engine:
        found, told = converse(engine)
        (turn,) = prompts_of(1, 60, seed=1)
        (before,) = run(engine, [turn], 1, session=SESSION)
        assert engine.purges.begin(PurgePrefixes("")) == frozenset()
        assert engine.purges.purge(PurgePrefixes("")) > 0
        (after,) = run(engine, [turn], 1, session=SESSION)
        assert (before.measured.num_cached >= 56, after.measured.num_cached) == (True, 0)
        assert answers([after]) == answers([before]) == expected[:1]
    assert found == expected
    assert all(num_cached >= 56 and after == before for num_cached, before, after in told[1:])


@pytest.mark.exhaustive
def test_a_retained_start_is_found_after_much_else_went_through_host_memory(bundled_model):
    small = {"host_cache_bytes": 3 << 20}
    engine, plain = make(bundled_model, **small), make(bundled_model, **small)
    (prompt,) = prompts_of(1, 60, seed=1)
    for one in (engine, plain):
        run(one, [prompt], 1, session=SESSION)
    assert engine.tend(TendSession(SESSION, "retain", "alice")).num_tokens >= 56
    for one in (engine, plain):
        run(one, prompts_of(80, 60, seed=2), 2)
    found = [run(one, [[*prompt, 7, 8]], 1)[0].measured.num_cached for one in (engine, plain)]
    assert found[0] >= 56
    assert found[1] == 0, "without that it went"
