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

NEMOTRON_3_NANO = {
    "architectures": ["NemotronHForCausalLM"],
    "torch_dtype": "bfloat16",
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "vocab_size": 131072,
    "hidden_size": 2688,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "attention_head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "chunk_size": 128,
    "layer_norm_epsilon": 1e-5,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "tie_word_embeddings": False,
    "max_position_embeddings": 262144,
}
"""NVIDIA-Nemotron-3-Nano-30B-A3B: 23 M, 23 E and 6 * layers."""

PUBLISHED: dict[str, dict[str, object]] = {
    "8b": NEMOTRON_H_8B,
    "nano": NEMOTRON_3_NANO,
    "8b-slice": {**NEMOTRON_H_8B, "hybrid_override_pattern": "M-M*-M"},
    "nano-slice": {**NEMOTRON_3_NANO, "hybrid_override_pattern": "MEM*EM"},
}
"""Slices have layers of every kind in their published widths, and so the same kernels, but only a few."""
TITLES = {
    "8b": "Nemotron-H 8B",
    "nano": "Nemotron 3 Nano",
    "8b-slice": "6 layers of Nemotron-H 8B",
    "nano-slice": "6 layers of Nemotron 3 Nano",
    "120m": "120 M parameters",
    "2m": "2 M parameters",
}


def configuration(name: str) -> dict[str, object]:
    """Returns the ``config.json`` of a model in :data:`TITLES`; the small ones are those of
    ``side_by_side``."""
    if name in PUBLISHED:
        return dict(PUBLISHED[name])
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
