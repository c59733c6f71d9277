"""Engines in which requests have to make room for each other."""

from __future__ import annotations

from pathlib import Path

from engine.config import EngineConfig
from engine.engine import Engine
from testing.engines.sanitizing import SANITIZE


def crowded_engine(model_dir: Path, num_seqs: int, *, mode: str, k: int, steps_ahead: int) -> Engine:
    """Return an engine with ``k`` n-gram drafts and small blocks, so that rows often grow and states are
    often stored."""
    return Engine(
        EngineConfig(
            model_dir,
            "both",
            device="cpu",
            max_num_seqs=num_seqs,
            max_batch_tokens=64,
            block_size=4,
            max_model_len=128,
            num_speculative=k,
            drafter="ngram" if k else None,
            steps_ahead=steps_ahead,
            cache_mode=mode,
            state_block_size=8 if mode == "all" else None,
            cache_memory_bytes=64 << 20,
            sanitize=SANITIZE and not steps_ahead,
        )
    )
