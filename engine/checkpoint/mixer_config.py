"""Sizes and options of each kind of mixer, the same for all families.

Published checkpoints spell fields in several ways (``conv_kernel`` or ``mamba_d_conv``). This module unites
spellings with the same meaning. An option that only one family has is set by that family's file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from engine.checkpoint.checkpoint_fields import DTYPES
from engine.checkpoint.config_fields import ConfigFields
from engine.checkpoint.rotary_config import RotaryConfig
from kernels.moe.moe_route import Scoring

Activation = Literal["relu_squared", "silu_gated"]
"""``relu(up(x))^2`` (Primer, arXiv:2109.08668), or ``silu(gate(x)) * up(x)`` (SwiGLU, arXiv:2002.05202)."""

GateOrder = Literal["gate_first", "norm_first", "gate_alone"]
"""``norm(y * silu(z))``, ``norm(y) * silu(z)`` or ``y * silu(z)``."""


@dataclass(frozen=True)
class MambaConfig:
    """A Mamba-2 mixer. Head ``h`` shares B and C with its group, ``h // (num_heads // num_groups)``."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_width: int
    chunk_size: int
    dt_limit: tuple[float, float]
    conv_bias: bool
    proj_bias: bool
    ssm_dtype: torch.dtype
    norm_groups: int
    """Number of parts of ``d_inner``. Each part is normalized by itself."""
    gate_order: GateOrder = "gate_first"
    in_scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors of ``in_proj``'s outputs: gate z, x, B, C and dt."""
    out_scale: float = 1.0

    @classmethod
    def read(cls, fields: ConfigFields, *, norm_groups: int | None = None) -> MambaConfig:
        """Read the fields. ``norm_groups`` is by default the number of groups of B and C."""
        heads, groups = ("mamba_num_heads", "mamba_n_heads"), ("n_groups", "mamba_n_groups")
        num_heads, num_groups = fields.integer(*heads), fields.integer(*groups)
        if num_heads % num_groups:
            expected = f"a divisor of {fields.spelling(*heads)} ({num_heads})"
            raise fields.error(fields.spelling(*groups), num_groups, expected)
        ssm_dtype = fields.choice("mamba_ssm_cache_dtype", choices=tuple(DTYPES), default="float32")
        return cls(
            num_heads=num_heads,
            head_dim=fields.integer("mamba_head_dim", "mamba_d_head"),
            state_size=fields.integer("ssm_state_size", "mamba_d_state"),
            num_groups=num_groups,
            conv_width=fields.integer("conv_kernel", "mamba_d_conv", minimum=2),
            chunk_size=fields.integer("chunk_size", "mamba_chunk_size", default=128),
            dt_limit=fields.interval("time_step_limit", "mamba_dt_limit", default=(0.0, float("inf"))),
            conv_bias=fields.boolean("use_conv_bias", "mamba_conv_bias", default=True),
            proj_bias=fields.boolean("use_bias", "mamba_proj_bias", default=False),
            ssm_dtype=DTYPES[ssm_dtype],
            norm_groups=num_groups if norm_groups is None else norm_groups,
        )

    @property
    def d_inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Number of channels of x, B and C together. All of them pass through one convolution."""
        return self.d_inner + 2 * self.num_groups * self.state_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """``heads, head_dim, state_size`` of a sequence's state in one layer."""
        return self.num_heads, self.head_dim, self.state_size

    @property
    def proj_size(self) -> int:
        """Number of rows of ``in_proj``: gate z, then (x, B, C), then dt."""
        return self.d_inner + self.conv_channels + self.num_heads

    @property
    def proj_sizes(self) -> tuple[int, int, int, int, int]:
        """Number of rows of each part of ``in_proj``: z, x, B, C, dt."""
        bc_size = self.num_groups * self.state_size
        return self.d_inner, self.d_inner, bc_size, bc_size, self.num_heads

    def kept_bytes(self, itemsize: int) -> int:
        """Return the bytes that a replay keeps of a token: x, B, and each head's decay and step in float32
        (:mod:`kernels.replay.selective_state_flush`)."""
        return (self.d_inner + self.num_groups * self.state_size) * itemsize + 8 * self.num_heads


@dataclass(frozen=True)
class GatedDeltaNetConfig:
    """A Gated DeltaNet. Value head ``h`` shares q and k with its key head, ``h // heads_per_key_head``."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    ssm_dtype: torch.dtype
    interleaved: bool
    """Whether projections are stored by key head, with all rows of a key head together (Qwen3-Next)."""

    @classmethod
    def read(cls, fields: ConfigFields, *, interleaved: bool) -> GatedDeltaNetConfig:
        num_key_heads = fields.integer("linear_num_key_heads")
        num_value_heads = fields.integer("linear_num_value_heads")
        if num_value_heads % num_key_heads:
            raise fields.error(
                "linear_num_value_heads",
                num_value_heads,
                f"a multiple of linear_num_key_heads ({num_key_heads})",
            )
        ssm_dtype = fields.choice(
            "mamba_ssm_dtype", "mamba_ssm_cache_dtype", choices=tuple(DTYPES), default="float32"
        )
        return cls(
            num_key_heads=num_key_heads,
            num_value_heads=num_value_heads,
            key_head_dim=fields.integer("linear_key_head_dim"),
            value_head_dim=fields.integer("linear_value_head_dim"),
            conv_width=fields.integer("linear_conv_kernel_dim", minimum=2),
            ssm_dtype=DTYPES[ssm_dtype],
            interleaved=interleaved,
        )

    @property
    def heads_per_key_head(self) -> int:
        return self.num_value_heads // self.num_key_heads

    @property
    def key_size(self) -> int:
        """Number of channels of q. It equals that of k."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Number of channels of v. It equals those of the gate and of the output."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """Number of channels of v, q and k together. All of them pass through one convolution."""
        return self.value_size + 2 * self.key_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """``heads, head_dim, state_size`` of a sequence's state in one layer."""
        return self.num_value_heads, self.value_head_dim, self.key_head_dim

    def kept_bytes(self, itemsize: int) -> int:
        """Return the bytes that a replay keeps of a token: v, and in float32 k and each head's decay and beta
        (:mod:`kernels.replay.gated_delta_flush`)."""
        return self.value_size * itemsize + 4 * self.key_size + 8 * self.num_value_heads


@dataclass(frozen=True)
class HeadNormConfig:
    """RMS norms of each head of q and k, before the rotary embedding."""

    eps: float
    offset: float = 0.0
    """Added to the stored weights: 1 if the checkpoint stores weights around 0."""


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor of ``q k^T``; ``1 / sqrt(head_dim)`` unless the checkpoint says otherwise."""
    in_scale: float = 1.0
    """Factor of q, k and v after their projections."""
    out_scale: float = 1.0
    bias: bool = False
    """Whether q, k and v have a bias."""
    out_bias: bool = False
    rotary: RotaryConfig | None = None
    """None if there is no positional encoding."""
    head_norms: HeadNormConfig | None = None
    output_gate: bool = False
    """Whether attention's result is multiplied by ``sigmoid(gate)``. In ``q_proj`` each head's gate follows
    its query."""

    @classmethod
    def read(cls, fields: ConfigFields, *, head_dim: int | None = None) -> AttentionConfig:
        """Read the fields. ``head_dim`` is the default; with None the checkpoint must name its own."""
        num_heads = fields.integer("num_attention_heads")
        num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise fields.error(
                "num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})"
            )
        if head_dim is None:
            head_dim = fields.integer("head_dim", "attention_head_dim")
        else:
            head_dim = fields.integer("head_dim", "attention_head_dim", default=head_dim)
        return cls(num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5)


@dataclass(frozen=True)
class MlpConfig:
    """An MLP: ``down(act(up(x)))``."""

    intermediate_size: int
    bias: bool
    activation: Activation
    gate_scale: float = 1.0
    """Factor of the gate before its activation."""
    out_scale: float = 1.0

    @property
    def is_gated(self) -> bool:
        return self.activation == "silu_gated"


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts, and optionally two latent projections around them and one shared expert."""

    num_experts: int
    experts_per_token: int
    expert_groups: int
    groups_per_token: int
    normalize_weights: bool
    scaling_factor: float
    intermediate_size: int
    shared_intermediate_size: int
    """0: there is no shared expert."""
    latent_size: int | None
    bias: bool
    """Whether the shared expert and the latent projections have a bias. Routed experts have none."""
    activation: Activation
    scoring: Scoring = "sigmoid"
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied by ``sigmoid(gate)``, one gate per token."""
