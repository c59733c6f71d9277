"""Llama and similar models: attention with rotary embedding, then a SwiGLU MLP (arXiv:2307.09288).

    r = r + attention_i(rms_norm(r))
    r = r + mlp_i(rms_norm(r))

| architecture | differs from Llama by |
|---|---|
| Llama | |
| Mistral (without a sliding window) | |
| Qwen2 | biases of q, k and v |
| Qwen3 | RMS norms of the heads of q and k |

There is no recurrent layer and no state: a request has only KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.checkpoint.checkpoint_fields import CheckpointFields
from engine.checkpoint.mixer_config import AttentionConfig, HeadNormConfig, MlpConfig
from engine.checkpoint.model_config import LayerType, ModelConfig
from engine.checkpoint.rotary_config import RotaryConfig
from engine.models.block import Block
from engine.models.builder import Builder
from engine.models.family import Family

MIXERS: tuple[LayerType, ...] = ("attention", "mlp")
"""The mixers of each layer."""
NORM_EPS = 1e-6
"""The norms' epsilon if ``config.json`` does not name it."""
MISTRAL_WINDOW = 4096
"""Sliding window, in tokens, of a Mistral model whose ``config.json`` has no such field."""


def configure(fields: CheckpointFields) -> ModelConfig:
    """Read the configuration.

    Raises :class:`ModelLoadError` that names the field, its value and the supported values.
    """
    fields.require("hidden_act", "silu", default="silu")
    _refuse_windows(fields)
    num_layers = fields.integer("num_hidden_layers")
    return ModelConfig.of(
        fields,
        layer_types=MIXERS * num_layers,
        attention=_attention(fields),
        mlp=MlpConfig(
            fields.integer("intermediate_size"), fields.boolean("mlp_bias", default=False), "silu_gated"
        ),
        default_norm_eps=NORM_EPS,
    )


def blocks(build: Builder) -> Iterator[Block]:
    """Yield two blocks per layer."""
    for layer in range(len(build.config.layer_types) // len(MIXERS)):
        at = f"layers.{layer}."
        yield build.block(f"{at}input_layernorm", build.attention(f"{at}self_attn."))
        yield build.block(f"{at}post_attention_layernorm", build.mlp(f"{at}mlp."))


def _refuse_windows(fields: CheckpointFields) -> None:
    """Refuse sliding windows: here every token attends to all tokens before it.

    Qwen's checkpoints name a window but do not use it.
    """
    if fields.architecture == "MistralForCausalLM":
        fields.require("sliding_window", None, default=MISTRAL_WINDOW)
    fields.require("use_sliding_window", False, default=False)
    names = fields.raw.get("layer_types") or []
    if not isinstance(names, list) or any(name != "full_attention" for name in names):
        raise fields.error("layer_types", names, "full_attention in every layer")


def _attention(fields: CheckpointFields) -> AttentionConfig:
    head_dim = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    attention = AttentionConfig.read(fields, head_dim=head_dim)
    if fields.architecture == "Qwen2ForCausalLM":
        bias, out_bias = True, False
    else:
        bias = out_bias = fields.boolean("attention_bias", default=False)
    head_norms = HeadNormConfig(fields.number("rms_norm_eps", default=NORM_EPS))
    return replace(
        attention,
        bias=bias,
        out_bias=out_bias,
        rotary=RotaryConfig.read(fields, attention.head_dim),
        head_norms=head_norms if fields.architecture == "Qwen3ForCausalLM" else None,
    )


FAMILY = Family(
    architectures=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    configure=configure,
    prefixes=("model.",),
    embedding="embed_tokens",
    last_norm="norm",
    blocks=blocks,
)
