"""Models and engines that the tests of speculation and of tensor parallelism share."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.grammar import grammars
from testing.checkpoints.random_checkpoint import DENSE_WITH_MTP, MOE_WITH_MTP, make_checkpoint
from testing.engines.speculating import Engines


@pytest.fixture(autouse=True)
def patient_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers wait long for the masks of their grammars: lanes have the lowest priority, and other tests take
    the processor from them."""
    monkeypatch.setattr(grammars, "MAX_WAITED_S", 600.0)


@pytest.fixture(scope="module")
def models(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    def random(name: str, shape: dict[str, object]) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp(name), shape, seed=5)

    return {
        "bundled": bundled_model,
        "dense": random("dense", DENSE_WITH_MTP),
        "moe": random("moe", MOE_WITH_MTP),
    }


@pytest.fixture(scope="module")
def engines() -> Engines:
    return Engines()
