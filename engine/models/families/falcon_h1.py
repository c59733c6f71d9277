"""Falcon-H1: in each layer attention and Mamba-2 read the same input; then a SwiGLU MLP (arXiv:2507.22448).

    x = rms_norm(r);  r = r + mamba_i(x) + attention_i(x)
    r = r + mlp_i(rms_norm(r))

The output of each projection is scaled by its own factor (muP, arXiv:2203.03466): ``*_multiplier(s)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.checkpoint.checkpoint_fields import CheckpointFields
from engine.checkpoint.mixer_config import AttentionConfig, GateOrder, MambaConfig, MlpConfig
from engine.checkpoint.model_config import LayerType, ModelConfig
from engine.checkpoint.rotary_config import RotaryConfig
from engine.models.block import Block
from engine.models.builder import Builder
from engine.models.family import Family

MIXERS: tuple[LayerType, ...] = ("mamba", "attention", "mlp")
"""The mixers of each layer."""


def configure(fields: CheckpointFields) -> ModelConfig:
    """Read the configuration.

    Raises :class:`ModelLoadError` that names the field, its value and the supported values.
    """
    fields.require("hidden_act", "silu", default="silu")
    for projections in ("mamba_proj_bias", "projectors_bias", "attention_bias"):
        fields.require(projections, False, default=False)
    gate_scale, out_scale = fields.numbers("mlp_multipliers", 2)
    config = ModelConfig.of(
        fields,
        layer_types=MIXERS * fields.integer("num_hidden_layers"),
        mamba=_mamba(fields),
        attention=_attention(fields),
        mlp=MlpConfig(
            fields.integer("intermediate_size"),
            fields.boolean("mlp_bias", default=False),
            "silu_gated",
            gate_scale=gate_scale,
            out_scale=out_scale,
        ),
    )
    return replace(
        config,
        embedding_scale=fields.number("embedding_multiplier", default=1.0),
        logit_scale=fields.number("lm_head_multiplier", default=1.0),
    )


def blocks(build: Builder) -> Iterator[Block]:
    """Yield two blocks per layer. The first one holds Mamba-2 and attention, which read the same input."""
    for layer in range(len(build.config.layer_types) // len(MIXERS)):
        at = f"layers.{layer}."
        mixers = build.mamba(f"{at}mamba."), build.attention(f"{at}self_attn.")
        yield build.block(f"{at}input_layernorm", *mixers)
        yield build.block(f"{at}pre_ff_layernorm", build.mlp(f"{at}feed_forward."))


def _mamba(fields: CheckpointFields) -> MambaConfig:
    mamba = MambaConfig.read(fields)
    order: GateOrder
    if not fields.boolean("mamba_rms_norm", default=False):
        order = "gate_alone"
    else:
        is_norm_first = fields.boolean("mamba_norm_before_gate", default=True)
        order = "norm_first" if is_norm_first else "gate_first"
    in_scale = fields.number("ssm_in_multiplier", default=1.0)
    z, x, b, c, dt = (in_scale * one for one in fields.numbers("ssm_multipliers", 5))
    return replace(
        mamba,
        gate_order=order,
        in_scales=(z, x, b, c, dt),
        out_scale=fields.number("ssm_out_multiplier", default=1.0),
    )


def _attention(fields: CheckpointFields) -> AttentionConfig:
    head_dim = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", default=head_dim)
    attention = AttentionConfig.read(fields, head_dim=head_dim)
    return replace(
        attention,
        rotary=RotaryConfig.read(fields, head_dim),
        # The published model scales keys. Scaling their products with the queries gives the same result.
        scale=attention.scale * fields.number("key_multiplier", default=1.0),
        in_scale=fields.number("attention_in_multiplier", default=1.0),
        out_scale=fields.number("attention_out_multiplier", default=1.0),
    )


FAMILY = Family(
    architectures=("FalconH1ForCausalLM",),
    configure=configure,
    prefixes=("model.",),
    embedding="embed_tokens",
    last_norm="final_layernorm",
    blocks=blocks,
)
