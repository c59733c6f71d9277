"""The minimum of bytes and FLOP of a step, by configuration."""

from __future__ import annotations

import pytest

from engine.checkpoint.model_config import ModelConfig
from engine.cost.step_size import StepSize
from engine.models import read_config
from engine.parallel.tensor_parallel import TensorParallel
from twinfang.flags.table import BUNDLED_MODEL


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return read_config(BUNDLED_MODEL)


def test_ranks_share_what_one_moves(model):
    alone, half = StepSize.of(model), StepSize.of(model, TensorParallel(0, 2))
    assert half.slot_bytes == pytest.approx(alone.slot_bytes / 2, rel=0.1)
    assert half.pair_flops == alone.pair_flops / 2
    assert half.body < 0.6 * alone.body
