"""Several ranks answer like one: real processes that share a model, its KV heads and its Mamba heads."""

from contextlib import contextmanager

import pytest

from engine.config import EngineConfig
from engine.lead_engine import LeadEngine
from engine.rank_processes import RankProcesses, work
from tests.checkpoints import DENSE_WITH_MTP, MOE_WITH_MTP, make_checkpoint
from tests.engine.speculating import (
    Engines,
    assert_nothing_is_owned,
    assert_same,
    greedy_asks,
    serve,
    short_asks,
)


@pytest.fixture(scope="module")
def models(bundled_model, tmp_path_factory):
    def random(name, shape):
        return make_checkpoint(tmp_path_factory.mktemp(name), shape, seed=5)

    return {
        "bundled": bundled_model,
        "dense": random("dense", DENSE_WITH_MTP),
        "moe": random("moe", MOE_WITH_MTP),
    }


@pytest.fixture(scope="module")
def engines():
    return Engines()


@contextmanager
def lead_engine(model_dir, size, **settings):
    """Rank 0 in this process, the others in their own."""
    settings = {"max_num_seqs": 32, "cache_memory_bytes": 64 << 20, "max_batch_tokens": 256, **settings}
    config = EngineConfig(
        model_dir, "both", device="cpu", tensor_parallel=size, num_threads=1, sanitize=True, **settings
    )
    failures: list[BaseException] = []
    ranks = RankProcesses(config, work, on_fatal=failures.append)
    try:
        yield LeadEngine(config, ranks.join(), ranks.tell)
    finally:
        ranks.stop()
    assert not failures


@pytest.mark.parametrize(
    ("model", "size", "mode", "k", "drafter"),
    [
        ("bundled", 2, "all", 0, None),
        ("bundled", 4, "align", 3, "mtp"),
        ("dense", 2, "none", 2, "ngram"),
        ("moe", 2, "all", 3, "mtp"),
    ],
)
def test_answers_of_several_ranks_equal_those_of_one(engines, models, model, size, mode, k, drafter):
    asks = [*greedy_asks(6, seed=1), *short_asks(4, seed=2)]
    expected = engines.plain(models[model], asks)
    with lead_engine(models[model], size, cache_mode=mode, num_speculative=k, drafter=drafter) as engine:
        assert_same(serve(engine, asks, per_step=3), expected)
        assert_nothing_is_owned(engine)
