"""Writes a trained model as a NemotronH checkpoint in the published form, and reads it back."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from bundled_tokenizer import BOS, EOS, IM_END, PAD
from nemotron_h_training import NemotronHForTraining, TrainingConfig
from safetensors.torch import load_file, save_file

LAYER_TYPES = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}


def published_config(config: TrainingConfig) -> dict[str, object]:
    """Returns config.json with the names of transformers' NemotronHConfig."""
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "layers_block_type": [LAYER_TYPES[kind] for kind in config.pattern],
        "num_nextn_predict_layers": 1,
        "mtp_layers_block_type": [LAYER_TYPES[kind] for kind in config.mtp_pattern],
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": config.mamba_num_heads,
        "mamba_head_dim": config.mamba_head_dim,
        "ssm_state_size": config.ssm_state_size,
        "n_groups": config.n_groups,
        "conv_kernel": config.conv_kernel,
        "expand": config.d_inner // config.hidden_size,
        "chunk_size": config.chunk_size,
        "mamba_hidden_act": "silu",
        "mamba_ssm_cache_dtype": "float32",
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_proj_bias": False,
        "mlp_bias": False,
        "attention_bias": False,
        # transformers clamps a prompt's time steps from below by time_step_min, but not a decoded token's.
        # With so small a limit, both give the same result, also as implementations without the clamp.
        "time_step_min": 1e-6,
        "time_step_max": 0.1,
        "time_step_floor": 1e-6,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "residual_in_fp32": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_position_embeddings,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


def save_checkpoint(model: NemotronHForTraining, folder: Path) -> None:
    """Writes config.json, generation_config.json and model.safetensors in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", published_config(model.config))
    generation = {"bos_token_id": BOS, "eos_token_id": [EOS, IM_END], "pad_token_id": PAD, "do_sample": False}
    _write_json(folder / "generation_config.json", generation)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_checkpoint(folder: Path, config: TrainingConfig) -> NemotronHForTraining:
    """Returns the model as it will be served: bfloat16 weights, float32 arithmetic."""
    model = NemotronHForTraining(config)
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.eval()


def rounded_to_bfloat16(model: NemotronHForTraining) -> NemotronHForTraining:
    """Returns a float32 copy with the weights that the checkpoint would hold. All measurements use such a
    copy."""
    copy = NemotronHForTraining(model.config)
    copy.load_state_dict({k: v.to(torch.bfloat16).float() for k, v in model.state_dict().items()})
    return copy.to(next(model.parameters()).device).eval()


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
