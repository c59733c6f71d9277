"""Nemotron-H: Mamba-2, attention and MLP or MoE layers in any order (arXiv:2504.03624).

    r = embedding(tokens)
    r = r + mixer_i(rms_norm_i(r))        for every layer i
    logits = lm_head(rms_norm_f(r))

Every layer holds exactly one mixer. There is no positional encoding, because the Mamba layers see the order
of tokens. Nemotron 3 adds MTP layers and latent MoE, whose experts work between two extra projections.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.checkpoint.checkpoint_fields import CheckpointFields
from engine.checkpoint.mixer_config import AttentionConfig, MambaConfig, MlpConfig, MoeConfig
from engine.checkpoint.model_config import LayerType, ModelConfig, MtpConfig
from engine.models.block import Block
from engine.models.builder import Builder
from engine.models.family import Family, MtpFamily
from wire.errors import ModelLoadError

_LAYER_TYPE_OF_SYMBOL: dict[str, LayerType] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_LAYER_TYPE_OF_NAME: dict[str, LayerType] = {
    "linear_attention": "mamba",
    "mamba": "mamba",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}


def configure(fields: CheckpointFields) -> ModelConfig:
    """Read the configuration.

    Raises :class:`ModelLoadError` that names the field, its value and the supported values.
    """
    _refuse_unsupported(fields)
    layer_types = _layer_types(fields, "layers_block_type", "hybrid_override_pattern")
    if not {"mamba", "attention"} <= set(layer_types):
        raise ModelLoadError(
            f"{fields.path}: the layers are {', '.join(sorted(set(layer_types)))}; expected a hybrid "
            "with at least one Mamba and one attention layer"
        )
    mtp = _mtp(fields)
    used = {*layer_types, *(mtp.layer_types if mtp else ())}
    return ModelConfig.of(
        fields,
        layer_types=layer_types,
        mamba=MambaConfig.read(fields) if "mamba" in used else None,
        attention=AttentionConfig.read(fields) if "attention" in used else None,
        mlp=_mlp(fields) if "mlp" in used else None,
        moe=_moe(fields) if "moe" in used else None,
        mtp=mtp,
    )


def blocks(build: Builder) -> Iterator[Block]:
    """Yield one block per layer, each with one mixer."""
    return _layers(build, build.config.layer_types)


def mtp_blocks(build: Builder) -> Iterator[Block]:
    """Yield the sublayers of the MTP layer, which are like layers of the model.

    The one set of sublayers runs once for each draft. A checkpoint with a set for each prediction is refused:
    running its first set again would compute a different model.
    """
    mtp = build.config.require_mtp()
    further = f"layers.{len(mtp.layer_types)}.enorm.weight"
    if mtp.num_predictions > 1 and further in build:
        raise ModelLoadError(
            f"{build.weights.directory}: num_nextn_predict_layers is {mtp.num_predictions} and each "
            f"prediction has MTP layers of its own (found {build.prefix}{further}); only one set, looped, "
            "is supported. Use `drafter` ngram"
        )
    return _layers(build, mtp.layer_types)


def _layers(build: Builder, layer_types: Sequence[LayerType]) -> Iterator[Block]:
    for index, layer_type in enumerate(layer_types):
        yield build.block(f"layers.{index}.norm", build.mixer(layer_type, f"layers.{index}.mixer."))


def _mtp_last_norm(config: ModelConfig) -> str:
    return f"layers.{len(config.require_mtp().layer_types) - 1}.final_layernorm"


FAMILY = Family(
    architectures=("NemotronHForCausalLM",),
    configure=configure,
    prefixes=("backbone.", "model."),  # as published, and as transformers 5 may save it
    embedding="embeddings",
    last_norm="norm_f",
    blocks=blocks,
    mtp=MtpFamily(
        embedding_norm="layers.0.enorm",
        hidden_norm="layers.0.hnorm",
        joined_proj="layers.0.eh_proj",
        last_norm=_mtp_last_norm,
        blocks=mtp_blocks,
    ),
)


def _refuse_unsupported(fields: CheckpointFields) -> None:
    """Refuse values that the model can't compute. Ignoring them would change the result."""
    fields.require("mlp_hidden_act", "relu2", default="relu2")
    fields.require("mamba_hidden_act", "silu", default="silu")
    fields.require("attention_bias", False, default=False)
    fields.require("sliding_window", None, default=None)
    # The published model takes the projections' bias from use_bias. A different mamba_proj_bias is undefined.
    fields.require("mamba_proj_bias", False, fields.boolean("use_bias", default=False), default=False)


def _mlp(fields: CheckpointFields) -> MlpConfig:
    return MlpConfig(
        fields.integer("intermediate_size"), fields.boolean("mlp_bias", default=False), "relu_squared"
    )


def _moe(fields: CheckpointFields) -> MoeConfig:
    fields.require("n_shared_experts", 1, default=1)
    num_experts = fields.integer("n_routed_experts", "num_local_experts")
    expert_groups = fields.integer("n_group", default=1)
    if num_experts % expert_groups:
        raise fields.error("n_group", expert_groups, f"a divisor of n_routed_experts ({num_experts})")
    experts_per_group = num_experts // expert_groups
    # A group scores the sum of its two best experts (DeepSeek-V3, section 2.1.2).
    if expert_groups > 1 and experts_per_group < 2:
        raise fields.error(
            "n_group", expert_groups, f"at most {num_experts // 2}: each group needs two experts or more"
        )
    groups_per_token = fields.integer("topk_group", default=1, maximum=expert_groups)
    latent_size = fields.raw.get("moe_latent_size")
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=fields.integer("num_experts_per_tok", maximum=groups_per_token * experts_per_group),
        expert_groups=expert_groups,
        groups_per_token=groups_per_token,
        normalize_weights=fields.boolean("norm_topk_prob", default=True),
        scaling_factor=fields.number("routed_scaling_factor", default=1.0),
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_intermediate_size=fields.integer("moe_shared_expert_intermediate_size"),
        latent_size=None if latent_size is None else fields.integer("moe_latent_size"),
        bias=fields.boolean("mlp_bias", default=False),
        activation="relu_squared",
    )


def _mtp(fields: CheckpointFields) -> MtpConfig | None:
    num_predictions = fields.integer("num_nextn_predict_layers", default=0, minimum=0)
    if num_predictions == 0:
        return None
    return MtpConfig(
        num_predictions, _layer_types(fields, "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    )


def _layer_types(fields: CheckpointFields, list_name: str, pattern_name: str) -> tuple[LayerType, ...]:
    """Read layer types from the newer list of names, or from the older string of symbols."""
    names = fields.raw.get(list_name)
    if names is not None:
        known = list(_LAYER_TYPE_OF_NAME)
        if not isinstance(names, list) or not names or not all(name in known for name in names):
            raise fields.error(list_name, names, f"a list of {', '.join(known)}")
        return tuple(_LAYER_TYPE_OF_NAME[name] for name in names)
    pattern = fields.raw.get(pattern_name)
    if not isinstance(pattern, str) or not pattern or not set(pattern) <= set(_LAYER_TYPE_OF_SYMBOL):
        symbols = ", ".join(f"{symbol!r} ({kind})" for symbol, kind in _LAYER_TYPE_OF_SYMBOL.items())
        raise fields.error(pattern_name, pattern, f"a string of {symbols}, or {list_name} as a list")
    return tuple(_LAYER_TYPE_OF_SYMBOL[symbol] for symbol in pattern)
