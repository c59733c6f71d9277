"""How configurations describe quantised weights: which layers, in which blocks. All else is refused."""

from __future__ import annotations

import json

import pytest

from engine.checkpoint.config_fields import ConfigFields
from engine.checkpoint.quantization import Quantization, WeightScheme, read_quantization
from testing.checkpoints.quantized import FORMATS
from wire.errors import ModelLoadError

FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
INT8_WEIGHTS = {**FP8_WEIGHTS, "type": "int"}


def read(directory, config: object, *, beside: object = None) -> Quantization | None:
    raw = {} if config is None else {"quantization_config": config}
    if beside is not None:
        (directory / "hf_quant_config.json").write_text(json.dumps(beside))
    return read_quantization(ConfigFields(directory / "config.json", raw))


def compressed(**changes: object) -> dict[str, object]:
    groups = {"group_0": {"targets": ["Linear"], "weights": FP8_WEIGHTS}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
        **changes,
    }


def weights(**changes: object) -> dict[str, object]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {**FP8_WEIGHTS, **changes}}}
    return compressed(config_groups=groups)


def mixed(layers: dict[str, object]) -> dict[str, object]:
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


@pytest.mark.parametrize("name", FORMATS)
def test_published_formats_are_read(tmp_path, name):
    form = FORMATS[name]
    config = form.config(["lm_head", "model.layers.1.mixer.gate"])
    found = read(tmp_path, None, beside=config) if form.is_beside else read(tmp_path, config)
    scheme = found.scheme_of("model.layers.3.mixer.in_proj")
    assert (scheme.block_rows, scheme.block_columns) == form.block
    assert found.scheme_of("lm_head") is None
    assert found.scheme_of("model.layers.1.mixer.gate") is None
    assert (found.kv_cache == "fp8") == form.has_kv_scales


def test_a_checkpoint_that_is_not_quantised_has_none(tmp_path):
    assert read(tmp_path, None) is None


def test_config_json_goes_before_the_file_beside_it_unless_it_says_nothing(tmp_path):
    beside = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["b"]}}
    said = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["a"]}
    assert read(tmp_path, said, beside=beside).scheme_of("a") is None
    assert read(tmp_path, said, beside=beside).scheme_of("b") is not None
    assert read(tmp_path, {"quant_method": "modelopt"}, beside=beside).scheme_of("b") is None


def test_a_scale_an_output_or_a_block_of_modelopt(tmp_path):
    channel = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    assert read(tmp_path, channel).scheme_of("x") == WeightScheme("fp8", 1, None)
    block = {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}
    assert read(tmp_path, block).scheme_of("x") == WeightScheme("fp8", 128, 128)


def test_layers_of_a_mixed_modelopt_checkpoint_have_schemes_of_their_own(tmp_path):
    layers = {
        "backbone.layers.0.mixer.in_proj": {"quant_algo": "FP8"},
        "backbone.layers.1.mixer.experts": {"quant_algo": "FP8_PB_WO", "group_size": 64},
        "backbone.layers.2.mixer.q_proj": {"quant_algo": "UNQUANTIZED"},
    }
    found = read(tmp_path, mixed(layers) | {"ignore": ["backbone.layers.1.mixer.experts.3*"]})
    assert found.scheme_of("backbone.layers.0.mixer.in_proj") == WeightScheme("fp8", None, None)
    assert found.scheme_of("backbone.layers.1.mixer.experts.0.up_proj") == WeightScheme("fp8", 64, 64)
    for plain in ("0.mixer.out_proj", "1.mixer.experts.3.up_proj", "2.mixer.q_proj"):
        assert found.scheme_of(f"backbone.layers.{plain}") is None
    beside = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    said = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "config_groups": {}}
    assert read(tmp_path, said, beside=beside).scheme_of("backbone.layers.0.mixer.in_proj") is not None


@pytest.mark.parametrize(
    ("pattern", "left", "quantised"),
    [
        ("lm_head", ["lm_head"], ["model.lm_head_norm", "head"]),
        ("model.layers.1", ["model.layers.1.mixer.up_proj"], ["model.layers.11.mixer.up_proj"]),
        ("model.layers.1*", ["model.layers.1.x", "model.layers.12.x"], ["model.layers.2.x"]),
        ("*.self_attn*", ["model.layers.0.self_attn.q_proj"], ["model.layers.0.mlp.up_proj"]),
        ("conv1d", ["model.layers.0.mixer.conv1d"], ["model.layers.0.mixer.conv"]),
    ],
)
def test_names_and_wildcards_of_modelopt(tmp_path, pattern, left, quantised):
    found = read(tmp_path, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [pattern]})
    assert all(found.scheme_of(name) is None for name in left)
    assert all(found.scheme_of(name) is not None for name in quantised)


@pytest.mark.parametrize(
    ("pattern", "left", "quantised"),
    [
        ("model.layers.1.mlp.gate", ["model.layers.1.mlp.gate"], ["model.layers.1.mlp.gate_proj"]),
        ("re:.*mlp.gate$", ["model.layers.1.mlp.gate"], ["model.layers.1.mlp.gate_proj"]),
        ("re:model.layers.[0-3]..*", ["model.layers.2.mlp.gate"], ["x.model.layers.2.mlp.gate"]),
    ],
)
def test_names_and_expressions_of_compressed_tensors(tmp_path, pattern, left, quantised):
    found = read(tmp_path, compressed(ignore=[pattern]))
    assert all(found.scheme_of(name) is None for name in left)
    assert all(found.scheme_of(name) is not None for name in quantised)


def test_groups_of_compressed_tensors_have_schemes_of_their_own(tmp_path):
    groups = {
        "group_0": {"targets": ["re:.*down_proj$"], "weights": INT8_WEIGHTS, "format": "pack-quantized"},
        "group_1": {"targets": ["Linear"], "weights": {**FP8_WEIGHTS, "strategy": "tensor"}},
    }
    found = read(tmp_path, compressed(config_groups=groups))
    assert found.scheme_of("model.layers.0.mlp.down_proj") == WeightScheme("packed int8", 1, None)
    assert found.scheme_of("model.layers.0.mlp.up_proj") == WeightScheme("fp8", None, None)


def test_modules_not_to_convert_of_fp8(tmp_path):
    config = {"quant_method": "fp8", "weight_block_size": [128, 64]}
    found = read(
        tmp_path, {**config, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "vis.*"]}
    )
    assert found.scheme_of("model.layers.0.mlp.gate") is None
    assert found.scheme_of("vision.block") is None
    assert found.scheme_of("model.layers.0.mlp.gate_proj") == WeightScheme("fp8", 128, 64)
    assert found.scheme_of("model.layers.0.mlp.gate_proj").scale_grid(300, 64) == (3, 1)
    assert read(tmp_path, {"quant_method": "fp8"}).scheme_of("x") == WeightScheme("fp8", None, None)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("int8", "quantization_config is 'int8'"),
        ({"quant_method": "gptq", "bits": 8}, "quant_method 'gptq'"),
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers is None"),
        (mixed({"x": {"quant_algo": "FP8"}, "y": {"quant_algo": "W4A16_NVFP4"}}), "quant_algo 'W4A16_NVFP4'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "group_size": "8"}, r"group_size is \['8'"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["*"]}, r"pattern is .*regular expression"),
        (weights(num_bits=4), "float of 4 bits"),
        (compressed(format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized'"),
        (compressed(format="marlin-24"), "format 'marlin-24'"),
        (weights(symmetric=False), "asymmetric, with zero points"),
        (weights(actorder="group"), "actorder 'group'"),
        (weights(strategy="group"), "group_size is None"),
        (weights(strategy="tensor_group", group_size=16), "strategy 'tensor_group'"),
        (weights(strategy="block"), "block_structure is None"),
        (compressed(config_groups=None), "config_groups is None"),
        (compressed(config_groups={"a": {"targets": ["Embedding"], "weights": {}}}), "targets 'Embedding'"),
        (compressed(config_groups={"a": {"targets": ["Linear"]}}), "weights is None"),
        (compressed(quantization_status="frozen"), "quantization_status 'frozen'"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config 'sparse-24-bitmask'"),
        (compressed(transform_config={"config_groups": {"u": {}}}), "transform_config"),
        (compressed(ignore=["re:("]), "pattern is"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, config, named):
    with pytest.raises(ModelLoadError, match=named) as refused:
        read(tmp_path, config)
    assert "expected" in str(refused.value) or "supported are FP8 of modelopt" in str(refused.value)
