"""The models whose shapes the kernels are measured with."""

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
    """The sizes from which the ops' shapes follow."""

    name: str
    device: str
    """Kind of device on which its ops are measured."""
    config: ModelConfig
    experts: ExpertShape
    """Experts of a model of about the same size; this model's own layers are dense."""
    delta: GatedDeltaNetConfig
    """Gated DeltaNet of a model of about the same size."""
    block_size: int = 16

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, activations, KV and conv states."""
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
    """Returns the models of the serving benchmark, with experts of half an MLP each."""
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
    """Returns the configuration of a model in :mod:`benchmarks.steps.model_shape`, as an engine on such a
    device would have it."""
    with tempfile.TemporaryDirectory() as folder:
        directory = write_configuration(name, Path(folder), max_model_len=32768)
        return read_config(directory, device=device)
