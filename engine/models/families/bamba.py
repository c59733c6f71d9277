"""Bamba: Mamba-2 layers and a few attention layers, each followed by a SwiGLU MLP
(https://huggingface.co/blog/bamba).

    r = r + mixer_i(rms_norm(r))          Mamba-2, or attention with rotary embedding on half of each head
    r = r + mlp_i(rms_norm(r))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.checkpoint.checkpoint_fields import CheckpointFields
from engine.checkpoint.mixer_config import AttentionConfig, MambaConfig, MlpConfig
from engine.checkpoint.model_config import LayerType, ModelConfig
from engine.checkpoint.rotary_config import RotaryConfig
from engine.models.block import Block
from engine.models.builder import Builder
from engine.models.family import Family

ROTATED = 0.5
"""Part of each head that is rotated. All models were trained with 0.5, whatever value the checkpoint has."""


def configure(fields: CheckpointFields) -> ModelConfig:
    """Read the configuration.

    Raises :class:`ModelLoadError` that names the field, its value and the supported values.
    """
    fields.require("hidden_act", "silu", default="silu")
    head_dim = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    rotary = RotaryConfig.read(fields, head_dim, partial_rotary_factor=ROTATED)
    bias = fields.boolean("attention_bias", default=False)
    mlp_bias = fields.boolean("mlp_bias", default=False)
    return ModelConfig.of(
        fields,
        layer_types=_layer_types(fields),
        mamba=MambaConfig.read(fields),
        attention=replace(
            AttentionConfig.read(fields, head_dim=head_dim), rotary=rotary, bias=bias, out_bias=bias
        ),
        mlp=MlpConfig(fields.integer("intermediate_size"), mlp_bias, "silu_gated"),
    )


def blocks(build: Builder) -> Iterator[Block]:
    """Yield two blocks per layer."""
    for layer, kind in enumerate(build.config.layer_types[::2]):
        at = f"layers.{layer}."
        mixer = build.mamba(f"{at}mamba.") if kind == "mamba" else build.attention(f"{at}self_attn.")
        yield build.block(f"{at}input_layernorm", mixer)
        yield build.block(f"{at}pre_ff_layernorm", build.mlp(f"{at}feed_forward."))


def _layer_types(fields: CheckpointFields) -> tuple[LayerType, ...]:
    num_layers = fields.integer("num_hidden_layers")
    indices = fields.indices("attn_layer_indices", num_layers)
    kinds: list[LayerType] = []
    for layer in range(num_layers):
        kinds += ["attention" if layer in indices else "mamba", "mlp"]
    return tuple(kinds)


FAMILY = Family(
    architectures=("BambaForCausalLM",),
    configure=configure,
    prefixes=("model.",),
    embedding="embed_tokens",
    last_norm="final_layernorm",
    blocks=blocks,
)
