"""The models at whose shapes kernels are measured."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.steps.model_shape import write_configuration
from engine.checkpoint.mixer_config import GatedDeltaNetConfig
from engine.checkpoint.model_config import AttentionConfig, MambaConfig, ModelConfig
from engine.cost.weight_size import weight_bytes
from engine.models import read_config


@dataclass(frozen=True)
class ExpertShape:
    """The routed experts of one layer."""

    num_experts: int
    per_token: int
    hidden_size: int
    intermediate_size: int


@dataclass(frozen=True)
class Model:
    """What the ops' shapes follow from."""

    name: str
    device: str
    """Kind of device that its ops are measured on."""
    config: ModelConfig
    experts: ExpertShape
    """Of a model of about that size that has some; this one's layers are dense."""
    delta: GatedDeltaNetConfig
    """Likewise."""
    block_size: int = 16

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations, KV and conv states."""
        return self.config.dtype

    @property
    def mamba(self) -> MambaConfig:
        return self.config.mamba

    @property
    def attention(self) -> AttentionConfig:
        return self.config.attention

    @functools.cached_property
    def weight_bytes(self) -> int:
        return weight_bytes(self.config)


def small_models() -> list[Model]:
    """Those of the serving benchmark, with experts of half an MLP each."""
    return [
        Model("2 M", "cpu", _config("2m", "cpu"), ExpertShape(16, 4, 256, 192), _delta(4, 8, 32)),
        Model("120 M", "cpu", _config("120m", "cpu"), ExpertShape(16, 4, 768, 1152), _delta(6, 12, 128)),
    ]


def eight_b() -> Model:
    """Its experts are those of the NemotronH that has 30 B parameters and 3 B active ones, its Gated DeltaNet
    is that of Qwen3-Next."""
    experts, delta = ExpertShape(128, 6, 2688, 1856), _delta(16, 32, 128)
    return Model("8 B", "cuda", _config("8b", "cuda"), experts, delta)


def _delta(key_heads: int, value_heads: int, head_dim: int) -> GatedDeltaNetConfig:
    return GatedDeltaNetConfig(
        key_heads, value_heads, head_dim, head_dim, conv_width=4, ssm_dtype=torch.float32, interleaved=True
    )


def _config(name: str, device: str) -> ModelConfig:
    """Of a model in :mod:`benchmarks.steps.model_shape`, as an engine on such a device would have it."""
    with tempfile.TemporaryDirectory() as folder:
        directory = write_configuration(name, Path(folder), max_model_len=32768)
        return read_config(directory, device=device)
