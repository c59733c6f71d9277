"""A hybrid model without its recurrent layers, for comparison."""

from __future__ import annotations

from dataclasses import replace

from engine.checkpoint.model_config import RECURRENT, ModelConfig


def with_attention_alone(config: ModelConfig) -> ModelConfig:
    """Return the same model with an attention layer in place of each recurrent layer."""
    layer_types = tuple("attention" if layer in RECURRENT else layer for layer in config.layer_types)
    return replace(config, layer_types=layer_types)
