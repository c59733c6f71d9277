"""Features in a Llama's or a Mamba-2's ``config.json`` that are not implemented are refused by name."""

import json

import pytest

from engine.models import read_config
from wire.errors import ModelLoadError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": None}
QWEN = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": False}
MAMBA = {
    "architectures": ["Mamba2ForCausalLM"],
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 2,
}


def config_of(folder, fields):
    (folder / "config.json").write_text(json.dumps(fields))
    return read_config(folder)


@pytest.mark.parametrize(
    ("fields", "changes", "named"),
    [
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        (MISTRAL, {"sliding_window": 4096}, "sliding_window is 4096"),
        (QWEN, {"use_sliding_window": True}, "use_sliding_window is True"),
        (QWEN, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (MAMBA, {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        (MAMBA, {"rms_norm": False}, "rms_norm is False"),
        (MAMBA, {"expand": 4}, r"expand is 4; expected expand x hidden_size \(256\) to be .* \(128\)"),
        (MAMBA, {"n_groups": 3}, r"n_groups is 3; expected a divisor of num_heads \(8\)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) and len(value) == 1 else None,
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, fields, changes, named):
    config_of(tmp_path, fields)
    with pytest.raises(ModelLoadError, match=named):
        config_of(tmp_path, fields | changes)


def test_a_mistral_that_says_nothing_of_a_window_has_one(tmp_path):
    fields = {name: value for name, value in MISTRAL.items() if name != "sliding_window"}
    with pytest.raises(ModelLoadError, match="sliding_window is 4096"):
        config_of(tmp_path, fields)


def test_what_distinguishes_kin_is_read(tmp_path):
    plain, qwen2 = config_of(tmp_path, LLAMA).attention, config_of(tmp_path, QWEN).attention
    qwen3 = config_of(tmp_path, QWEN | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32}).attention
    assert (plain.bias, plain.out_bias, plain.head_norms, plain.head_dim) == (False, False, None, 16)
    assert (qwen2.bias, qwen2.out_bias, qwen2.head_norms) == (True, False, None)
    assert (qwen3.bias, qwen3.head_dim, qwen3.head_norms.eps) == (False, 32, 1e-6)


def test_a_mamba_2_has_no_limit_of_its_own_and_keeps_its_residuals_in_float32(tmp_path):
    config = config_of(tmp_path, MAMBA)
    assert (config.max_position_embeddings, config.residual_in_fp32) == (1 << 20, True)
    assert config.cache_spec().has_state
    assert not config.cache_spec().has_kv
