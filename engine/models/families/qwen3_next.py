"""Qwen3-Next and Qwen3.5 (text): Gated DeltaNet layers; every fourth layer has gated attention instead.
SwiGLU experts or one SwiGLU MLP follow in each layer
(https://qwenlm.github.io/blog/qwen3_next, arXiv:2412.06464).

    r = r + mixer_i(rms_norm(r))
    x = rms_norm(r);  r = r + experts_i(x) + sigmoid(gate_i x) * mlp_i(x)        or r + mlp_i(x)

The checkpoint stores the norms' weights minus 1. The MTP layer is one more layer with gated attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.checkpoint.checkpoint_fields import CheckpointFields
from engine.checkpoint.mixer_config import (
    AttentionConfig,
    GatedDeltaNetConfig,
    HeadNormConfig,
    MlpConfig,
    MoeConfig,
)
from engine.checkpoint.model_config import LayerType, ModelConfig, MtpConfig
from engine.checkpoint.rotary_config import RotaryConfig
from engine.models.block import Block
from engine.models.builder import Builder
from engine.models.family import Family, MtpFamily
from engine.models.layers.expert_weights import GATED_EXPERTS
from engine.models.layers.moe import MoeNames

ATTENTION_INTERVAL = 4
"""Default if the checkpoint doesn't list its attention layers: every fourth layer."""
NORM_EPS = 1e-6
"""The norms' epsilon if the checkpoint does not name it."""
ROTATED = 0.25
"""Part of each head that is rotated, if the checkpoint does not name it."""
MOE_NAMES = MoeNames(shared="shared_expert.", experts=GATED_EXPERTS)
_MIXERS: dict[str, LayerType] = {"linear_attention": "gated_delta", "full_attention": "attention"}


def configure(fields: CheckpointFields) -> ModelConfig:
    """Read the configuration.

    Raises :class:`ModelLoadError` that names the field, its value and the supported values.
    """
    fields.require("hidden_act", "silu", default="silu")
    mixers = _mixers(fields)
    feed_forwards = [_feed_forward(fields, layer) for layer in range(len(mixers))]
    kinds = [kind for layer in zip(mixers, feed_forwards, strict=True) for kind in layer]
    mtp = _mtp(fields)
    used = {*kinds, *(mtp.layer_types if mtp else ())}
    config = ModelConfig.of(
        fields,
        layer_types=tuple(kinds),
        gated_delta=_gated_delta(fields) if "gated_delta" in used else None,
        attention=_attention(fields) if "attention" in used else None,
        mlp=MlpConfig(fields.integer("intermediate_size"), False, "silu_gated") if "mlp" in used else None,
        moe=_moe(fields) if "moe" in used else None,
        mtp=mtp,
        default_norm_eps=NORM_EPS,
    )
    return replace(config, norm_offset=1.0)


def blocks(build: Builder) -> Iterator[Block]:
    """Yield two blocks per layer."""
    return _layers(build, build.config.layer_types)


def mtp_blocks(build: Builder) -> Iterator[Block]:
    """Yield the blocks of the MTP layer, which is like a layer of the model."""
    return _layers(build, build.config.require_mtp().layer_types)


def _layers(build: Builder, layer_types: tuple[LayerType, ...]) -> Iterator[Block]:
    for layer in range(len(layer_types) // 2):
        mixer, feed_forward = layer_types[2 * layer : 2 * layer + 2]
        at = f"layers.{layer}."
        name = f"{at}self_attn." if mixer == "attention" else f"{at}linear_attn."
        yield build.block(f"{at}input_layernorm", build.mixer(mixer, name))
        experts = build.moe(f"{at}mlp.", MOE_NAMES) if feed_forward == "moe" else build.mlp(f"{at}mlp.")
        yield build.block(f"{at}post_attention_layernorm", experts)


def _mixers(fields: CheckpointFields) -> list[LayerType]:
    num_layers = fields.integer("num_hidden_layers")
    interval = fields.integer("full_attention_interval", default=ATTENTION_INTERVAL)
    implied = [
        "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)
    ]
    names = fields.listed("layer_types", choices=_MIXERS, count=num_layers, default=implied)
    return [_MIXERS[name] for name in names]


def _feed_forward(fields: CheckpointFields, layer: int) -> LayerType:
    num_experts = fields.integer("num_experts", default=0, minimum=0)
    is_dense = layer in fields.indices("mlp_only_layers", fields.integer("num_hidden_layers"))
    step = fields.integer("decoder_sparse_step", default=1)
    return "moe" if num_experts and not is_dense and (layer + 1) % step == 0 else "mlp"


def _gated_delta(fields: CheckpointFields) -> GatedDeltaNetConfig:
    return GatedDeltaNetConfig.read(fields, interleaved=fields.architecture == "Qwen3NextForCausalLM")


def _attention(fields: CheckpointFields) -> AttentionConfig:
    attention = AttentionConfig.read(fields)
    bias = fields.boolean("attention_bias", default=False)
    return replace(
        attention,
        bias=bias,
        out_bias=bias,
        rotary=RotaryConfig.read(fields, attention.head_dim, partial_rotary_factor=ROTATED),
        head_norms=HeadNormConfig(fields.number("rms_norm_eps", default=NORM_EPS), offset=1.0),
        output_gate=fields.boolean("attn_output_gate", default=True),
    )


def _moe(fields: CheckpointFields) -> MoeConfig:
    num_experts = fields.integer("num_experts")
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", maximum=num_experts),
        expert_groups=1,
        groups_per_token=1,
        normalize_weights=fields.boolean("norm_topk_prob", default=True),
        scaling_factor=1.0,
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size"),
        latent_size=None,
        bias=False,
        activation="silu_gated",
        scoring="softmax",
        shared_gate=True,
    )


def _mtp(fields: CheckpointFields) -> MtpConfig | None:
    """Read whether there is an MTP layer.

    Qwen3.5 names it in ``config.json``. The ``config.json`` of Qwen3-Next does not: only the tensors show it.
    """
    names = "mtp_num_hidden_layers", "num_nextn_predict_layers"
    num_layers = fields.integer(*names, default=int(fields.stores("mtp.fc.weight")), minimum=0, maximum=1)
    return MtpConfig(1, ("attention", _feed_forward(fields, 0))) if num_layers else None


FAMILY = Family(
    architectures=(
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    ),
    configure=configure,
    prefixes=("model.", "model.language_model."),
    embedding="embed_tokens",
    last_norm="norm",
    blocks=blocks,
    mtp=MtpFamily(
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        joined_proj="fc",
        last_norm=lambda config: "norm",
        blocks=mtp_blocks,
    ),
)
