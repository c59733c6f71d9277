"""Sizes and options of each kind of mixer, whatever the family that it stands in.

Published checkpoints spell fields in several ways (``conv_kernel`` or ``mamba_d_conv``). Where the spellings
mean the same they end here. What only one family has, that family's file passes in.
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
    """Mamba-2 mixer. Head ``h`` shares B and C with its group, ``h // (num_heads // num_groups)``."""

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
    """Parts of ``d_inner`` that are normalized each on its own."""
    gate_order: GateOrder = "gate_first"
    in_scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors of gate z, x, B, C and dt behind ``in_proj``."""
    out_scale: float = 1.0

    @classmethod
    def read(cls, fields: ConfigFields, *, norm_groups: int | None = None) -> MambaConfig:
        """``norm_groups``: as many as there are groups of B and C unless given."""
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
        """x, B and C stand side by side and pass the convolution together."""
        return self.d_inner + 2 * self.num_groups * self.state_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """``heads, head_dim, state_size`` of a sequence's state in one layer."""
        return self.num_heads, self.head_dim, self.state_size

    @property
    def proj_size(self) -> int:
        """Rows of ``in_proj``: gate z, then (x, B, C), then dt."""
        return self.d_inner + self.conv_channels + self.num_heads

    @property
    def proj_sizes(self) -> tuple[int, int, int, int, int]:
        """The same one by one: z, x, B, C, dt."""
        bc_size = self.num_groups * self.state_size
        return self.d_inner, self.d_inner, bc_size, bc_size, self.num_heads


@dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Gated DeltaNet. Value head ``h`` shares q and k with its key head, ``h // heads_per_key_head``."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    ssm_dtype: torch.dtype
    interleaved: bool
    """Whether the projections are stored key head by key head, all of one together (Qwen3-Next)."""

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
        """Channels of q, and of k."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Channels of v, of the gate and of what comes out."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """v, q and k stand side by side and pass the convolution together."""
        return self.value_size + 2 * self.key_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """``heads, head_dim, state_size`` of a sequence's state in one layer."""
        return self.num_value_heads, self.value_head_dim, self.key_head_dim


@dataclass(frozen=True)
class HeadNormConfig:
    """RMS norms of single heads of q and k, before they turn."""

    eps: float
    offset: float = 0.0
    """Added to the stored weights: 1 where the checkpoint keeps them around 0."""


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Of ``q k^T``; ``1 / sqrt(head_dim)`` unless the checkpoint says otherwise."""
    in_scale: float = 1.0
    """Of q, k and v behind their projections."""
    out_scale: float = 1.0
    bias: bool = False
    """Of q, k and v."""
    out_bias: bool = False
    rotary: RotaryConfig | None = None
    """None: no positional encoding."""
    head_norms: HeadNormConfig | None = None
    output_gate: bool = False
    """What was attended to times ``sigmoid(gate)``; the gates stand in ``q_proj``, each behind its query."""

    @classmethod
    def read(cls, fields: ConfigFields, *, head_dim: int | None = None) -> AttentionConfig:
        """``head_dim``: what it is where the checkpoint doesn't say; None: it must."""
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
    """``down(act(up(x)))``"""

    intermediate_size: int
    bias: bool
    activation: Activation
    gate_scale: float = 1.0
    """Of what ``gate`` yields, before its activation."""
    out_scale: float = 1.0

    @property
    def is_gated(self) -> bool:
        return self.activation == "silu_gated"


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts, optionally inside a latent projection, optionally beside one shared expert."""

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
    """Of the shared expert and the latent projections; routed experts have none."""
    activation: Activation
    scoring: Scoring = "sigmoid"
    shared_gate: bool = False
    """The shared expert's output times ``sigmoid(gate)``, one gate a token."""
