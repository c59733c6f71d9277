"""Random checkpoints of all supported families, in their published form, with transformers as their
oracle."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    GraniteConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from testing.checkpoints.random_checkpoint import (
    DENSE_WITH_MTP,
    EOS_TOKEN_ID,
    make_checkpoint,
    transformers_logits,
    write_tokenizer,
)

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
    "eos_token_id": EOS_TOKEN_ID,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
GATED_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "num_hidden_layers": 4,
}
SPARSE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}


def _bamba() -> PreTrainedConfig:
    return BambaConfig(**SIZES, **MAMBA, num_hidden_layers=4, attn_layer_indices=[1])


def _granite(**changes: object) -> PreTrainedConfig:
    fields: dict[str, object] = {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 80,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
    }
    sizes = SIZES | {"intermediate_size": 48}
    return GraniteMoeHybridConfig(**sizes, **MAMBA, **(fields | changes))


def _falcon_h1(**changes: object) -> PreTrainedConfig:
    fields: dict[str, object] = {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "mamba_d_ssm": 128,
        "lm_head_multiplier": 0.6,
        "embedding_multiplier": 2.0,
        "mlp_multipliers": [0.7, 1.4],
        "key_multiplier": 0.8,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.7,
        "ssm_in_multiplier": 1.1,
        "ssm_out_multiplier": 0.6,
        "ssm_multipliers": [0.9, 1.2, 0.8, 1.3, 1.1],
    }
    return FalconH1Config(**SIZES, **MAMBA, **(fields | changes))


def _mamba2() -> PreTrainedConfig:
    return Mamba2Config(
        vocab_size=160,
        hidden_size=64,
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=2,
        chunk_size=16,
        num_hidden_layers=4,
        expand=2,
        eos_token_id=EOS_TOKEN_ID,
        bos_token_id=1,
        pad_token_id=0,
    )


LLAMA3_ROTARY = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class FamilyCase:
    """One checkpoint of a family."""

    family: str
    """The family's usual name."""
    config: Callable[[], PreTrainedConfig] | None
    """None for NemotronH, which :mod:`testing.checkpoints.random_checkpoint` makes."""
    has_mtp: bool = False
    is_representative: bool = True
    """Whether it represents its family in tests that can't try every checkpoint."""


def _qwen3_next() -> PreTrainedConfig:
    return Qwen3NextConfig(**SIZES, **GATED_DELTA, **SPARSE, mlp_only_layers=[3])


def _qwen3_5_moe() -> PreTrainedConfig:
    sizes = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
    return Qwen3_5MoeTextConfig(**sizes, **GATED_DELTA, **SPARSE)


def _granite_dense() -> PreTrainedConfig:
    return _granite(num_local_experts=0, num_experts_per_tok=0, position_embedding_type="rope")


def _falcon_h1_with_norm() -> PreTrainedConfig:
    return _falcon_h1(mamba_rms_norm=True)


def _qwen3_5() -> PreTrainedConfig:
    return Qwen3_5TextConfig(**SIZES, **GATED_DELTA)


def _llama() -> PreTrainedConfig:
    return LlamaConfig(**SIZES, num_hidden_layers=3, rope_parameters=LLAMA3_ROTARY)


def _mistral() -> PreTrainedConfig:
    return MistralConfig(**SIZES, num_hidden_layers=3, head_dim=32, sliding_window=None)


def _qwen2() -> PreTrainedConfig:
    return Qwen2Config(**SIZES, num_hidden_layers=3, tie_word_embeddings=True)


def _qwen3() -> PreTrainedConfig:
    return Qwen3Config(**SIZES, num_hidden_layers=3, head_dim=32)


def _granite_3() -> PreTrainedConfig:
    return GraniteConfig(
        **SIZES,
        num_hidden_layers=3,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.4,
        logits_scaling=2.0,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    )


CASES = {
    "nemotron-h": FamilyCase("Nemotron-H", None, has_mtp=True, is_representative=False),
    "bamba": FamilyCase("Bamba", _bamba),
    "granite-4": FamilyCase("Granite 4 hybrid", _granite),
    "granite-4-dense": FamilyCase("Granite 4 hybrid", _granite_dense, is_representative=False),
    "granite-3": FamilyCase("Granite 3", _granite_3, is_representative=False),
    "falcon-h1": FamilyCase("Falcon-H1", _falcon_h1),
    "falcon-h1-norm": FamilyCase("Falcon-H1", _falcon_h1_with_norm, is_representative=False),
    "qwen3-next": FamilyCase("Qwen3-Next", _qwen3_next, has_mtp=True),
    "qwen3.5": FamilyCase("Qwen3.5", _qwen3_5, has_mtp=True),
    "qwen3.5-moe": FamilyCase("Qwen3.5 MoE", _qwen3_5_moe, has_mtp=True, is_representative=False),
    "mamba-2": FamilyCase("Mamba-2", _mamba2),
    "llama": FamilyCase("Llama", _llama),
    "mistral": FamilyCase("Mistral", _mistral, is_representative=False),
    "qwen2": FamilyCase("Qwen2", _qwen2, is_representative=False),
    "qwen3": FamilyCase("Qwen3", _qwen3, is_representative=False),
}
"""Checkpoints by their names in the table of docs/models.md."""
REPRESENTATIVES = [name for name, case in CASES.items() if case.is_representative]
MODES = ("none", "align", "all")


def mode_pairs(first: int, always: Collection[str]) -> list[ParameterSet]:
    """Return parameters (name, cache mode, k). Every run includes one pair (cache mode, k) with speculation
    for each checkpoint in ``always``; ``first`` chooses which pair. Other parameters run only in ``make
    test-all``."""
    pairs = []
    for i, name in enumerate(CASES):
        for j, mode in enumerate(MODES):
            for k in (0, 3):
                is_here = name in always and k == 3 and (first + i) % len(MODES) == j
                pairs.append(pytest.param(name, mode, k, marks=[] if is_here else [pytest.mark.exhaustive]))
    return pairs


def exhaustive_but(*names: str) -> list[ParameterSet]:
    """Return all checkpoints as parameters. Every run includes the named checkpoints."""
    return [pytest.param(one, marks=[] if one in names else [pytest.mark.exhaustive]) for one in CASES]


def make_family_checkpoint(directory: Path, name: str, *, seed: int = 0) -> Path:
    """Writes a model directory with random weights, the same for the same arguments. Returns its path.

    As in :func:`testing.checkpoints.random_checkpoint.make_checkpoint`, a layer's output is as large as its
    input.
    """
    case = CASES[name]
    if case.config is None:
        return make_checkpoint(directory, DENSE_WITH_MTP, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    config = case.config()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    zero_centered = config.model_type.startswith("qwen3_")
    _randomize(model, generator, zero_centered=zero_centered)
    model.save_pretrained(directory, save_original_format=True)
    write_tokenizer(directory, config.vocab_size)
    if case.has_mtp:
        _add_mtp(directory, config, generator)
    return directory


@torch.inference_mode()
def family_logits(model_dir: str | Path, token_ids: list[int]) -> torch.Tensor:
    """Logits ``[n, vocab]`` of transformers after every token of one sequence, float32, without a cache."""
    if _architecture(str(model_dir)) == "NemotronHForCausalLM":
        return transformers_logits(model_dir, token_ids)
    return _oracle(str(model_dir))(torch.tensor([token_ids]), use_cache=False).logits[0]


@torch.inference_mode()
def family_drafting(model_dir: Path, token_ids: list[int]) -> torch.Tensor:
    """Return the output ``[n - 1, hidden]`` of Qwen's MTP layer at all positions except the last. Computes
    the MTP formula with transformers' own layer inside."""
    config, tensors = AutoConfig.from_pretrained(model_dir), load_file(model_dir / "model.safetensors")
    hidden = (
        _oracle(str(model_dir)).model(torch.tensor([token_ids]), use_cache=False).last_hidden_state[0, :-1]
    )
    embedded = tensors["model.embed_tokens.weight"][token_ids[1:]]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps)
        return scaled * (1 + tensors[f"mtp.{name}.weight"])

    joined = torch.cat([norm(embedded, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")], dim=-1)
    layer = {name: tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    layer |= {
        f"model.{name[4:]}": tensors[name] for name in tensors if name.startswith(("mtp.layers", "mtp.norm"))
    }
    with TemporaryDirectory() as folder:
        _one_layer(config).save_pretrained(folder)
        save_file(layer, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    x = joined @ tensors["mtp.fc.weight"].T
    return model.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]


def _one_layer(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration of one layer with full attention and, in a sparse model, experts."""
    fields = config.to_dict() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    if "mlp_only_layers" in fields:
        fields["mlp_only_layers"] = []
    return type(config).from_dict(fields)


@lru_cache(maxsize=64)
def _architecture(model_dir: str) -> str:
    content = json.loads((Path(model_dir) / "config.json").read_text(encoding="utf-8"))
    return str(content["architectures"][0])


@lru_cache(maxsize=4)
def _oracle(model_dir: str) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(model_dir)
    return AutoModelForCausalLM.from_pretrained(
        model_dir, config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def _randomize(model: PreTrainedModel, generator: torch.Generator, *, zero_centered: bool) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(_random(name, parameter.shape, generator, zero_centered=zero_centered))


def _random(name: str, shape: torch.Size, generator: torch.Generator, *, zero_centered: bool) -> torch.Tensor:
    def normal(std: float, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std + mean

    kind = name.rsplit(".", 1)[-1]
    if kind == "A_log":  # the share that decays per token ranges from almost 0 to almost 1
        return torch.rand(shape, generator=generator) * 3 - 1
    if kind == "dt_bias":
        return normal(1.0, mean=-2.0)
    if kind in ("D", "bias"):
        return normal(0.2)
    if "norm" in name:
        gated = "linear_attn.norm" in name
        return normal(0.2, mean=0.0 if zero_centered and not gated else 1.0)
    if "embed" in name:
        return normal(1.0)
    if "conv1d" in name:
        return normal(0.5)
    if name.startswith("lm_head"):
        return normal(4.0 / math.sqrt(shape[-1]))
    gain = 2.0 if any(part in name for part in ("down_proj", "q_proj", "k_proj", "output_linear")) else 1.0
    return normal(gain / math.sqrt(shape[-1]))


def _add_mtp(directory: Path, config: PreTrainedConfig, generator: torch.Generator) -> None:
    """Add ``mtp.*`` as published: one layer with full attention, and the modules before and after it."""
    model = AutoModelForCausalLM.from_config(_one_layer(config), dtype=torch.float32)
    _randomize(model, generator, zero_centered=True)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder, save_original_format=True)
        stored = load_file(Path(folder) / "model.safetensors")
    tensors = load_file(directory / "model.safetensors")
    tensors |= {
        name.replace("model.layers.", "mtp.layers."): tensor
        for name, tensor in stored.items()
        if name.startswith("model.layers.")
    }
    width = config.hidden_size
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{norm}.weight"] = 0.2 * torch.randn(width, generator=generator)
    joined = torch.randn(width, 2 * width, generator=generator) / math.sqrt(2 * width)
    tensors["mtp.fc.weight"] = joined
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    name = "mtp_num_hidden_layers" if config.model_type.startswith("qwen3_5") else "num_nextn_predict_layers"
    path.write_text(json.dumps(content | {name: 1}, indent=2), encoding="utf-8")
