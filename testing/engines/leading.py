"""Engines of several tensor-parallel ranks; the ranks other than 0 run in processes of their own."""

from contextlib import contextmanager

from engine.config import EngineConfig
from engine.engine import Engine
from engine.ranks.lead import LeadEngine
from engine.ranks.process import work
from engine.ranks.processes import RankProcesses


def own(engine):
    """Return the engine of this process, which is either the only one or rank 0's."""
    return engine.own if isinstance(engine, LeadEngine) else engine


@contextmanager
def lead_engine(model_dir, size, **settings):
    """Start an engine with rank 0 in this process and each other rank in its own."""
    settings = {
        "max_num_seqs": 32,
        "cache_memory_bytes": 64 << 20,
        "max_batch_tokens": 256,
        "sanitize": True,
        **settings,
    }
    config = EngineConfig(model_dir, "both", device="cpu", tensor_parallel=size, num_threads=1, **settings)
    failures: list[BaseException] = []
    ranks = RankProcesses(config, work, on_fatal=failures.append)
    try:
        yield LeadEngine(Engine(config, ranks.join().tp), ranks.tell)
    finally:
        ranks.stop()
    assert not failures
