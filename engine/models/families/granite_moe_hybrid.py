"""Granite 4 hybrid: Mamba-2 and a few attention layers, each followed by a SwiGLU MLP. Most models have
routed experts in addition to the MLP (https://www.ibm.com/granite/docs/models/granite).

    r = scale_e * embedding(tokens)
    r = r + scale_r * mixer_i(rms_norm(r))                  Mamba-2 or attention
    x = rms_norm(r);  r = r + scale_r * (experts_i(x) + mlp_i(x))
    logits = lm_head(rms_norm(r)) / scale_l
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.checkpoint.checkpoint_fields import CheckpointFields
from engine.checkpoint.mixer_config import AttentionConfig, MambaConfig, MlpConfig, MoeConfig
from engine.checkpoint.model_config import LayerType, ModelConfig
from engine.checkpoint.rotary_config import RotaryConfig
from engine.models.block import Block
from engine.models.builder import Builder
from engine.models.family import Family
from engine.models.layers.expert_weights import ExpertNames
from engine.models.layers.mlp import MlpNames
from engine.models.layers.moe import MoeNames

MOE_NAMES = MoeNames(
    router="router.layer", experts=ExpertNames(stacked=("input_linear.weight", "output_linear.weight"))
)
MLP_NAMES = MlpNames(("input_linear",), "output_linear")
_MIXERS: dict[str, LayerType] = {
    "linear_attention": "mamba",
    "mamba": "mamba",
    "full_attention": "attention",
    "attention": "attention",
}


def configure(fields: CheckpointFields) -> ModelConfig:
    """Read the configuration.

    Raises :class:`ModelLoadError` that names the field, its value and the supported values.
    """
    fields.require("hidden_act", "silu", default="silu")
    moe = _moe(fields)
    mixers = _mixers(fields)
    kinds: list[LayerType] = []
    for mixer in mixers:
        kinds += [mixer, "mlp"] if moe is None else [mixer, "moe", "mlp"]
    config = ModelConfig.of(
        fields,
        layer_types=tuple(kinds),
        mamba=MambaConfig.read(fields) if "mamba" in kinds else None,
        attention=_attention(fields) if "attention" in kinds else None,
        mlp=MlpConfig(fields.integer("shared_intermediate_size"), False, "silu_gated"),
        moe=moe,
        default_norm_eps=1e-6,
    )
    return replace(
        config,
        embedding_scale=fields.number("embedding_multiplier", default=1.0),
        residual_scale=fields.number("residual_multiplier", default=1.0),
        logit_scale=1.0 / fields.number("logits_scaling", default=1.0, above=0.0),
    )


def blocks(build: Builder) -> Iterator[Block]:
    """Yield two blocks per layer. The second one holds the MLP, and the experts if there are any."""
    config = build.config
    each = 2 if config.moe is None else 3
    for layer, kind in enumerate(config.layer_types[::each]):
        at = f"layers.{layer}."
        mixer = build.mamba(f"{at}mamba.") if kind == "mamba" else build.attention(f"{at}self_attn.")
        yield build.block(f"{at}input_layernorm", mixer)
        mlp = build.mlp(f"{at}shared_mlp.", MLP_NAMES)
        experts = [] if config.moe is None else [build.moe(f"{at}block_sparse_moe.", MOE_NAMES)]
        yield build.block(f"{at}post_attention_layernorm", *experts, mlp)


def _mixers(fields: CheckpointFields) -> list[LayerType]:
    num_layers = fields.integer("num_hidden_layers")
    names = fields.listed("layer_types", "layers_block_type", choices=_MIXERS, count=num_layers)
    return [_MIXERS[one] for one in names]


def _attention(fields: CheckpointFields) -> AttentionConfig:
    fields.require("position_embedding_type", "rope", "nope", None, default=None)
    head_dim = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    turns = fields.raw.get("position_embedding_type") == "rope"
    rotary = RotaryConfig.read(fields, head_dim) if turns else None
    bias = fields.boolean("attention_bias", default=False)
    scale = fields.number("attention_multiplier", default=1.0)
    attention = AttentionConfig.read(fields, head_dim=head_dim)
    return replace(attention, scale=scale, rotary=rotary, bias=bias, out_bias=bias)


def _moe(fields: CheckpointFields) -> MoeConfig | None:
    num_experts = fields.integer("num_local_experts", default=0, minimum=0)
    if num_experts == 0:
        return None
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", maximum=num_experts),
        expert_groups=1,
        groups_per_token=1,
        normalize_weights=True,
        scaling_factor=1.0,
        intermediate_size=fields.integer("intermediate_size"),
        shared_intermediate_size=0,
        latent_size=None,
        bias=False,
        activation="silu_gated",
        scoring="softmax",
    )


FAMILY = Family(
    architectures=("GraniteMoeHybridForCausalLM",),
    configure=configure,
    prefixes=("model.",),
    embedding="embed_tokens",
    last_norm="norm",
    blocks=blocks,
)
