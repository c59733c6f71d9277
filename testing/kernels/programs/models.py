"""Shapes of published models, and what else decides the types of a step's kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Heads:
    """Attention. ``rotary_half`` is 0 without rotary embedding. Gated heads are normalized too."""

    query: int
    kv: int
    size: int
    rotary_half: int = 0
    is_gated: bool = False


@dataclass(frozen=True)
class Mamba:
    """A Mamba-2 layer."""

    heads: int
    head_dim: int
    groups: int
    state_size: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.heads * self.head_dim + 2 * self.groups * self.state_size


@dataclass(frozen=True)
class Delta:
    """A Gated DeltaNet layer, whose heads have the same size for keys and values."""

    key_heads: int
    value_heads: int
    head_dim: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: v, q and k."""
        return (self.value_heads + 2 * self.key_heads) * self.head_dim


@dataclass(frozen=True)
class Experts:
    """A mixture of experts. ``is_softmax`` is Qwen's routing, which also gates the shared expert."""

    count: int
    per_token: int
    intermediate: int
    is_softmax: bool = False


@dataclass(frozen=True)
class Model:
    """The sizes that decide which programs serving compiles; ``feed_forward`` is 0 without dense layers."""

    name: str
    hidden: int
    vocab_size: int
    attention: Heads
    mamba: Mamba | None = None
    delta: Delta | None = None
    experts: Experts | None = None
    feed_forward: int = 0
    gated_feed_forward: bool = False


NEMOTRON_H_8B = Model(
    "Nemotron-H 8B", 4096, 131072, Heads(32, 8, 128), mamba=Mamba(128, 64, 8, 128), feed_forward=21504
)
NANO = Model(
    "Nemotron 3 Nano",
    2688,
    131072,
    Heads(32, 2, 128),
    mamba=Mamba(64, 64, 8, 128),
    experts=Experts(128, 6, 1856),
)
QWEN3_NEXT = Model(
    "Qwen3-Next", 2048, 151936, Heads(16, 2, 256, rotary_half=32, is_gated=True),
    delta=Delta(16, 32, 128), experts=Experts(512, 10, 512, is_softmax=True),
)  # fmt: skip
BAMBA = Model(
    "Bamba 9B", 4096, 128256, Heads(32, 8, 128, rotary_half=32), mamba=Mamba(128, 64, 1, 128),
    feed_forward=14336, gated_feed_forward=True,
)  # fmt: skip
MODELS = (NEMOTRON_H_8B, NANO, QWEN3_NEXT, BAMBA)


@dataclass(frozen=True)
class Load:
    """What a server's settings and its requests decide. A decode row has ``positions``, 1 + k."""

    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    is_stochastic: bool = False
    kv_dtype: torch.dtype | None = None
    """None: the model's."""
    weight_dtype: torch.dtype | None = None
    """float8_e4m3fn or int8; None: the model's."""
    weight_block: tuple[int, int] | None = (1, 128)
    """Rows and columns of a quantised weight that share a scale; None: one scale."""
    rows: int = 8
    positions: int = 4
    prompt: int = 512
    has_boundaries: bool = True

    def __str__(self) -> str:
        default, names = Load(), []
        for name, value in vars(self).items():
            if value != getattr(default, name):
                names.append(f"{name}={str(value).removeprefix('torch.')}")
        return ", ".join(names)


BFLOAT16, FLOAT32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
TYPICAL = Load()
QUANTISED = Load(weight_dtype=FP8)
LOADS = (
    TYPICAL,
    QUANTISED,
    Load(weight_dtype=FP8, weight_block=(128, 128), rows=1, positions=1, prompt=1000, has_boundaries=False),
    Load(state_dtype=BFLOAT16, is_stochastic=True, kv_dtype=FP8, weight_dtype=torch.int8, weight_block=None),
    Load(dtype=FLOAT32, weight_dtype=FP8, positions=2),
)
"""The whole grid, for each model."""
