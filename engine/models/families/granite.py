"""Granite 3: a Llama with four extra factors (https://www.ibm.com/granite/docs/models/granite).

r = scale_e * embedding(tokens)
r = r + scale_r * attention_i(rms_norm(r))           softmax(scale_a q k^T) v
r = r + scale_r * mlp_i(rms_norm(r))
logits = lm_head(rms_norm(r)) / scale_l
"""

from __future__ import annotations

from dataclasses import replace

from engine.checkpoint.checkpoint_fields import CheckpointFields
from engine.checkpoint.model_config import ModelConfig
from engine.models.families import llama
from engine.models.family import Family


def configure(fields: CheckpointFields) -> ModelConfig:
    """Read the configuration.

    Raises :class:`ModelLoadError` that names the field, its value and the supported values.
    """
    config = llama.configure(fields)
    assert config.attention is not None
    scale = fields.number("attention_multiplier", default=1.0)  # not 1 / sqrt(head_dim)
    return replace(
        config,
        attention=replace(config.attention, scale=scale),
        embedding_scale=fields.number("embedding_multiplier", default=1.0),
        residual_scale=fields.number("residual_multiplier", default=1.0),
        logit_scale=1.0 / fields.number("logits_scaling", default=1.0, above=0.0),
    )


FAMILY = Family(
    architectures=("GraniteForCausalLM",),
    configure=configure,
    prefixes=("model.",),
    embedding="embed_tokens",
    last_norm="norm",
    blocks=llama.blocks,
)
