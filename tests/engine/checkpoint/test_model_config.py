"""Reads ``config.json`` as published, and refuses settings that can't be honoured, by name."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace

import pytest
import torch

from engine.models import read_config
from wire.errors import ConfigError, ModelLoadError

NEWER = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "dtype": "bfloat16",
    "vocab_size": 131072,
    "hidden_size": 2688,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "intermediate_size": 1856,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "ssm_state_size": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "chunk_size": 128,
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
    "mamba_ssm_cache_dtype": "float32",
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "moe_latent_size": None,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "layer_norm_epsilon": 1e-5,
    "residual_in_fp32": False,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
RENAMED = {
    "layers_block_type": ("hybrid_override_pattern", "ME*-"),
    "dtype": ("torch_dtype", "bfloat16"),
    "head_dim": ("attention_head_dim", 128),
    "n_groups": ("mamba_n_groups", 8),
    "conv_kernel": ("mamba_d_conv", 4),
    "use_conv_bias": ("mamba_conv_bias", True),
    "chunk_size": ("mamba_chunk_size", 128),
    "time_step_limit": ("mamba_dt_limit", [0.0, math.inf]),
    "layer_norm_epsilon": ("rms_norm_eps", 1e-5),
}


@pytest.fixture
def directory(tmp_path):
    """Writes a model directory out of ``NEWER`` with the given fields changed; None drops a field."""

    def write(**changes):
        content = {name: value for name, value in (NEWER | changes).items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(content))
        return tmp_path

    return write


def test_fields_end_up_under_one_name(directory):
    config = read_config(directory(), device="cuda")
    assert config.layer_types == ("mamba", "moe", "attention", "mlp")
    assert config.dtype == torch.bfloat16
    assert (config.vocab_size, config.hidden_size, config.max_position_embeddings) == (131072, 2688, 262144)
    assert (config.mamba.d_inner, config.mamba.conv_channels, config.mamba.proj_size) == (4096, 6144, 10304)
    assert config.mamba.dt_limit == (0.0, math.inf)
    assert config.moe.num_experts == 128
    assert config.moe.scaling_factor == 2.5
    assert config.mtp is None


@pytest.mark.parametrize("name", RENAMED)
def test_older_field_names_mean_the_same(directory, name):
    newer = read_config(directory())
    old_name, value = RENAMED[name]
    assert read_config(directory(**{name: None, old_name: value})) == newer


def test_legacy_layer_type_names_mean_the_same(directory):
    newer = read_config(directory())
    older = directory(layers_block_type=["mamba", "moe", "attention", "mlp"])
    assert read_config(older) == newer


def test_a_dense_checkpoint_needs_no_moe_fields(directory):
    path = directory(
        layers_block_type=["linear_attention", "full_attention"],
        intermediate_size=None,
        n_routed_experts=None,
        num_experts_per_tok=None,
        moe_intermediate_size=None,
    )
    config = read_config(path)
    assert config.moe is None
    assert config.mlp is None


def test_mtp_pattern_in_both_spellings(directory):
    newer = directory(num_nextn_predict_layers=2, mtp_layers_block_type=["full_attention", "moe"])
    mtp = read_config(newer).mtp
    assert (mtp.num_predictions, mtp.layer_types) == (2, ("attention", "moe"))
    older = directory(num_nextn_predict_layers=2, mtp_hybrid_override_pattern="*E")
    assert read_config(older).mtp == mtp


def test_cache_spec_counts_layers_by_kind(directory):
    config = read_config(
        directory(
            layers_block_type=None, hybrid_override_pattern="MM*MEM-*", mamba_ssm_cache_dtype="bfloat16"
        ),
        dtype="bfloat16",
    )
    spec = config.cache_spec()
    assert (spec.attn_layers, spec.kv_heads, spec.head_dim) == (2, 2, 128)
    assert (spec.mamba_layers, spec.mamba_heads, spec.mamba_head_dim, spec.state_size) == (4, 64, 64, 128)
    assert (spec.conv_channels, spec.conv_width) == (6144, 4)
    assert (spec.kv_dtype, spec.conv_dtype, spec.ssm_dtype) == (torch.bfloat16,) * 3


def test_the_mtp_layers_kv_counts_where_it_is_wanted(directory):
    config = read_config(
        directory(num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E*"), dtype="bfloat16"
    )
    plain, with_mtp = config.cache_spec(), config.cache_spec(mtp=True)
    assert with_mtp == replace(plain, attn_layers=plain.attn_layers + 2)


def test_state_is_float32_unless_the_checkpoint_says_otherwise(directory):
    config = read_config(directory(mamba_ssm_cache_dtype=None), dtype="bfloat16")
    assert config.cache_spec().ssm_dtype == torch.float32


def test_auto_is_float32_on_cpu_and_says_so(directory, caplog):
    with caplog.at_level(logging.INFO):
        assert read_config(directory(), device="cpu").dtype == torch.float32
    assert "computes in float32, the checkpoint is in bfloat16" in caplog.text


def test_generation_config_wins_over_config_for_eos(directory):
    path = directory()
    assert read_config(path).eos_token_ids == (2,)
    generation = path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [2, 11]}))
    assert read_config(path).eos_token_ids == (2, 11)
    generation.write_text(json.dumps({"do_sample": True}))
    assert read_config(path).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "NemotronHForCausalLM"]),
        ({"architectures": None}, ["architectures is None", "NemotronHForCausalLM"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantised", "'gptq'", "FP8 of modelopt"]),
        ({"mlp_hidden_act": "silu"}, ["mlp_hidden_act is 'silu'", "'relu2'"]),
        ({"mamba_hidden_act": "gelu"}, ["mamba_hidden_act is 'gelu'", "'silu'"]),
        ({"attention_bias": True}, ["attention_bias is True", "False"]),
        ({"sliding_window": 4096}, ["sliding_window is 4096", "None"]),
        ({"mamba_proj_bias": True}, ["mamba_proj_bias is True", "False"]),
        ({"n_shared_experts": 2}, ["n_shared_experts is 2", "1"]),
        ({"hidden_size": None}, ["hidden_size is missing"]),
        ({"hidden_size": "4096"}, ["hidden_size is '4096'", "an integer"]),
        ({"vocab_size": 0}, ["vocab_size is 0", "at least 1"]),
        ({"conv_kernel": 1}, ["conv_kernel is 1", "at least 2"]),
        ({"use_conv_bias": 1}, ["use_conv_bias is 1", "true or false"]),
        ({"layer_norm_epsilon": "small"}, ["layer_norm_epsilon is 'small'", "a number"]),
        ({"time_step_limit": [0.1]}, ["time_step_limit is [0.1]", "a pair"]),
        ({"time_step_limit": [0.1, 0.0]}, ["time_step_limit is [0.1, 0.0]", "ascending"]),
        ({"time_step_limit": [0.0, "much"]}, ["time_step_limit is 'much'", "a number"]),
        ({"mamba_ssm_cache_dtype": "float16"}, ["mamba_ssm_cache_dtype is 'float16'", "float32 or bfloat16"]),
        ({"dtype": "float64"}, ["dtype is 'float64'"]),
        ({"n_groups": 7}, ["n_groups is 7", "a divisor of mamba_num_heads (64)"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads is 3", "a divisor of num_attention_heads (32)"]),
        ({"n_group": 5}, ["n_group is 5", "a divisor of n_routed_experts (128)"]),
        ({"n_group": 128}, ["n_group is 128", "at most 64"]),
        ({"n_group": 4, "topk_group": 5}, ["topk_group is 5", "at most 4"]),
        ({"n_group": 64, "topk_group": 2}, ["num_experts_per_tok is 6", "at most 4"]),
        ({"layers_block_type": ["conv"]}, ["layers_block_type is ['conv']", "linear_attention"]),
        ({"layers_block_type": None}, ["hybrid_override_pattern is None", "'M' (mamba)"]),
        ({"layers_block_type": None, "hybrid_override_pattern": "M*X"}, ["'M*X'", "'*' (attention)"]),
        ({"layers_block_type": ["linear_attention", "mlp"]}, ["mamba, mlp", "one attention layer"]),
        ({"num_nextn_predict_layers": 1}, ["mtp_hybrid_override_pattern is None"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id is '</s>'", "a token id"]),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_honoured_is_refused_by_name(directory, changes, named):
    with pytest.raises(ModelLoadError) as refused:
        read_config(directory(**changes))
    for part in ["config.json", *named]:
        assert part in refused.value.message


def test_a_quantised_release_is_refused_by_its_second_file_too(directory):
    path = directory()
    (path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"hf_quant_config\.json"):
        read_config(path)


def test_float16_needs_an_explicit_dtype_on_a_gpu(directory):
    with pytest.raises(ModelLoadError, match="dtype is 'float16'"):
        read_config(directory(dtype="float16"), device="cuda")
    assert read_config(directory(dtype="float16"), "bfloat16", "cuda").dtype == torch.bfloat16


def test_an_unknown_dtype_names_the_known(directory):
    with pytest.raises(ConfigError, match="dtype is 'fp8'; supported are auto, float32, bfloat16"):
        read_config(directory(), dtype="fp8")


def test_a_missing_or_broken_config_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json can't be read as JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="holds a JSON list"):
        read_config(tmp_path)


def test_the_language_model_of_one_that_sees_pictures_speaks_for_itself(directory):
    path = directory(hidden_size=None, vocab_size=None, text_config={"hidden_size": 64, "vocab_size": 99})
    config = read_config(path)
    assert (config.hidden_size, config.vocab_size) == (64, 99)
