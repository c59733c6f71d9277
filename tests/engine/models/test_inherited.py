"""Models that are loaded once for several servers."""

from __future__ import annotations

import gc
import hashlib
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.engine_parts import load_weights
from engine.models import inherited, read_config
from engine.parallel.tensor_parallel import ALONE
from engine.request import Request
from telemetry.start_up import StartUp
from wire.messages.sampling_params import SamplingParams

CPU = torch.device("cpu")


@pytest.fixture
def _keeping(monkeypatch):
    monkeypatch.setattr(inherited, "_models", {})
    monkeypatch.setattr(inherited, "_keeps", [])
    inherited.keep_models()


def tensors() -> dict[int, torch.Tensor]:
    return {id(one): one for one in gc.get_objects() if type(one) is torch.Tensor and one.numel()}


def digest(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).digest()


def loaded(model_dir: Path, dtype: str, start_up: StartUp):
    config = EngineConfig(model_dir, "decode", dtype=dtype, device="cpu")  # type: ignore[arg-type]
    return load_weights(config, read_config(model_dir, dtype, CPU), CPU, ALONE, start_up)


@pytest.mark.usefixtures("_keeping")
def test_a_kept_model_is_used_again_with_the_same_settings_only(bundled_model):
    first, again = StartUp(), StartUp()
    model = loaded(bundled_model, "float32", first)
    assert loaded(bundled_model, "float32", again) is model
    assert again.weight_bytes == first.weight_bytes > 0
    assert "loaded before this process was forked" in str(again)
    assert loaded(bundled_model, "bfloat16", StartUp()) is not model


def test_a_model_that_nobody_wants_to_keep_is_loaded_again(bundled_model):
    assert loaded(bundled_model, "float32", StartUp()) is not loaded(bundled_model, "float32", StartUp())


@pytest.mark.usefixtures("_keeping")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_serving_never_writes_weights(bundled_model, dtype):
    """Processes share them, and would otherwise get copies of their pages."""
    before = tensors()
    loaded(bundled_model, dtype, StartUp())
    weights = [one for key, one in tensors().items() if key not in before]
    assert sum(weight.nbytes for weight in weights) > 1e6
    as_loaded = [digest(weight) for weight in weights]
    engine = Engine(
        EngineConfig(bundled_model, "both", dtype=dtype, device="cpu", cache_memory_bytes=64 << 20)
    )
    for number in range(3):
        engine.add(Request(f"r{number}", list(range(5, 45 + number)), SamplingParams(max_tokens=4)))
    while not engine.step().did_nothing:
        pass
    assert [digest(weight) for weight in weights] == as_loaded
