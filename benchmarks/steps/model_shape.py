"""Shapes of models that benchmarks fill with random weights: directories with only a ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path

NEMOTRON_H_8B = {
    "architectures": ["NemotronHForCausalLM"],
    "torch_dtype": "bfloat16",
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "vocab_size": 131072,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "intermediate_size": 21504,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "chunk_size": 256,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}
"""The published configuration (nvidia/Nemotron-H-8B-Base-8K, ``config.json``): 24 M, 24 - and 4 * layers."""

TITLES = {"8b": "Nemotron-H 8B", "120m": "120 M parameters", "2m": "2 M parameters"}


def configuration(name: str) -> dict[str, object]:
    """Returns the ``config.json`` of a model in :data:`TITLES`; the small ones are those of
    ``side_by_side``."""
    if name == "8b":
        return dict(NEMOTRON_H_8B)
    from testing.checkpoints.random_model import MODELS  # needs transformers

    fields = {key: value for key, value in vars(MODELS[name].shape).items() if value is not None}
    added = {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": fields.pop("pattern")}
    return {**fields, **added, "torch_dtype": "float32"}


def write_configuration(name: str, folder: Path, *, max_model_len: int) -> Path:
    """Writes a model directory in ``folder`` for contexts of ``max_model_len`` tokens; any length works,
    because no layer has positions."""
    directory = folder / f"{name}-{max_model_len}"
    directory.mkdir(parents=True, exist_ok=True)
    fields = {**configuration(name), "max_position_embeddings": max_model_len}
    (directory / "config.json").write_text(json.dumps(fields, indent=1), encoding="utf-8")
    return directory
