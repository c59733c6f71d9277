"""Bytes of both forms of speculative states, counted by hand, and which form ``auto`` chooses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from engine.checkpoint.mixer_config import GatedDeltaNetConfig, MambaConfig
from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.cost.speculative_state import StateBytes, kept_token_bytes
from engine.memory.cache_formats import CacheFormats
from engine.models import read_config
from wire.errors import ConfigError

NEMOTRON_8B = MambaConfig(
    num_heads=128,
    head_dim=64,
    state_size=128,
    num_groups=8,
    conv_width=4,
    chunk_size=128,
    dt_limit=(0.0, float("inf")),
    conv_bias=True,
    proj_bias=False,
    ssm_dtype=torch.float32,
    norm_groups=8,
)
QWEN3_NEXT = GatedDeltaNetConfig(16, 32, 128, 128, 4, torch.float32, interleaved=True)


def model(layer: MambaConfig | GatedDeltaNetConfig, num_layers: int = 1) -> ModelConfig:
    is_mamba = isinstance(layer, MambaConfig)
    return ModelConfig(
        architecture="made up",
        dtype=torch.bfloat16,
        eos_token_ids=(2,),
        vocab_size=100,
        hidden_size=64,
        max_position_embeddings=4096,
        layer_types=("mamba" if is_mamba else "gated_delta",) * num_layers,
        norm_eps=1e-5,
        tie_word_embeddings=False,
        mamba=layer if is_mamba else None,
        gated_delta=None if is_mamba else layer,
    )


def test_bytes_of_a_mamba_layer():
    sizes = StateBytes.of(model(NEMOTRON_8B), "cuda")
    assert sizes.scan == 128 * 64 * 128 * 4
    assert sizes.kept_by_conv == (8192 + 2 * 1024) * 2
    assert sizes.window == 3 * 10240 * 2
    assert sizes.kept == (8192 + 1024) * 2 + 128 * 8
    state = 4 * 2**20 + 61440
    assert sizes.moved_by_slots(4) == 5 * state
    assert sizes.moved_by_replay(4, num_accepted=2) == 2 * state + 6 * 19456 + 4 * 20480
    on_cpu = StateBytes.of(model(NEMOTRON_8B), "cpu")
    assert (on_cpu.kept, on_cpu.kept_by_conv) == ((8192 + 1024) * 4 + 1024, 10240 * 4)


def test_bytes_of_a_gated_delta_net_layer():
    sizes = StateBytes.of(model(QWEN3_NEXT, 3), "cuda")
    assert sizes.scan == 32 * 128 * 128 * 4
    assert sizes.kept_by_conv == (4096 + 2 * 2048) * 2
    assert sizes.kept == 4096 * 2 + 2048 * 4 + 32 * 8
    assert sizes.kept_token_bytes == 3 * (16640 + 16384)


@pytest.mark.parametrize(
    ("num_rows", "slots", "replay"),
    [(1, 0.51, 0.21), (8, 4.09, 1.68), (32, 16.34, 6.72), (64, 32.68, 13.44), (128, 65.37, 26.88)],
)
def test_gigabytes_a_step_of_nemotron_h_8b_are_those_of_the_decision(num_rows, slots, replay):
    sizes = StateBytes.of(model(NEMOTRON_8B, 24), "cuda")
    assert round(num_rows * sizes.moved_by_slots(4) / 1e9, 2) == slots
    assert round(num_rows * sizes.moved_by_replay(4, num_accepted=4) / 1e9, 2) == replay


@dataclass(frozen=True)
class Settings:
    speculative_state: str = "auto"
    num_speculative: int = 5
    max_num_seqs: int = 64
    tensor_parallel: int = 1
    sanitize: bool = False

    @property
    def num_positions(self) -> int:
        return 1 + self.num_speculative


@pytest.mark.parametrize(
    ("changes", "device_type", "replays"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"num_speculative": 4}, "cuda", True),
        ({"num_speculative": 3}, "cuda", True),
        ({"num_speculative": 2}, "cuda", False),
        ({"num_speculative": 0}, "cuda", False),
        ({"max_num_seqs": 7}, "cuda", False),
        ({"max_num_seqs": 8}, "cuda", True),
        ({"tensor_parallel": 2}, "cuda", False),
        ({"sanitize": True}, "cuda", False),
        ({"speculative_state": "slots"}, "cuda", False),
        ({"speculative_state": "replay", "num_speculative": 1, "max_num_seqs": 1}, "cuda", True),
        ({"speculative_state": "replay"}, "cpu", True),
    ],
)
def test_auto_replays_where_a_gpu_moves_far_fewer_bytes(changes, device_type, replays):
    settings = replace(Settings(), **changes)
    assert (kept_token_bytes(settings, model(NEMOTRON_8B), device_type) > 0) is replays


def test_auto_rounds_no_state_at_random_twice():
    by_chance = replace(
        model(NEMOTRON_8B),
        cache_formats=CacheFormats(kv=None, ssm=torch.bfloat16, stochastic_rounding=True),
    )
    assert kept_token_bytes(Settings(num_speculative=15), by_chance, "cuda") == 0
    assert kept_token_bytes(Settings("replay"), by_chance, "cuda") > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_speculative": 0}, r"`speculative_state` replay means nothing with `num_speculative` 0"),
        ({"tensor_parallel": 2}, r"replay and `tensor_parallel` 2 exclude each other.*choose slots"),
        ({"sanitize": True}, r"replay and `sanitize` exclude each other.*choose slots"),
        ({"speculative_state": "twice"}, r"`speculative_state` must be one of auto, slots, replay, got 'tw"),
    ],
)
def test_what_replays_do_not_support_is_refused(bundled_model: Path, settings, message):
    asked = {"speculative_state": "replay", "num_speculative": 3, **settings}
    with pytest.raises(ConfigError, match=message):
        EngineConfig(bundled_model, "both", device="cpu", **asked)


def test_a_model_without_states_can_not_replay():
    stateless = replace(model(NEMOTRON_8B), layer_types=("mlp",), mamba=None)
    assert kept_token_bytes(Settings(), stateless, "cuda") == 0
    with pytest.raises(ConfigError, match="without recurrent layers; leave it out"):
        kept_token_bytes(Settings("replay"), stateless, "cuda")


def test_a_prefill_server_takes_the_setting_and_has_slots(bundled_model: Path):
    asked = {"speculative_state": "replay", "num_speculative": 3}
    config = EngineConfig(bundled_model, "prefill", device="cpu", **asked)
    assert not config.demand(read_config(bundled_model)).replays
    config = EngineConfig(bundled_model, "decode", device="cpu", **asked)
    demand = config.demand(read_config(bundled_model))
    assert demand.replays
    assert demand.slots.running == config.max_num_seqs
