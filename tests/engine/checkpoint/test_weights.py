"""Reads safetensors files: mapped where possible, refused by name otherwise. Also tests their fingerprint."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.fingerprint import fingerprint
from engine.checkpoint.weights import INDEX_NAME, WeightFiles
from engine.models import load_model
from testing.checkpoints.random_checkpoint import DENSE, LATENT_MOE, make_checkpoint
from wire.errors import ModelLoadError


@pytest.fixture
def two_files(tmp_path):
    """``a [2, 3]`` float32 and ``b [4]`` bfloat16 in one file, ``c [5]`` float32 in another; an index."""
    save_file(
        {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)},
        tmp_path / "1.safetensors",
    )
    save_file({"c": torch.arange(5.0)}, tmp_path / "2.safetensors")
    weight_map = {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), LATENT_MOE)


def rewrite(directory, **changes):
    """Changes tensors of a single-file checkpoint; None drops one."""
    path = directory / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_tensors_of_several_files_by_name(two_files):
    weights = WeightFiles(two_files)
    assert torch.equal(weights.take("a", (2, 3)), torch.arange(6.0).view(2, 3))
    assert torch.equal(weights.take("c", (5,)), torch.arange(5.0))
    assert "b" in weights
    assert "d" not in weights
    assert weights.unused() == ["b"]


def test_files_without_an_index_are_read_all(two_files):
    (two_files / INDEX_NAME).unlink()
    assert WeightFiles(two_files).take("c", (5,)).sum() == 10


def test_a_tensor_of_the_wanted_dtype_is_mapped_and_another_converted(two_files):
    weights = WeightFiles(two_files)
    mapped = [weights.take("a", (2, 3)) for _ in range(2)]
    assert mapped[0].data_ptr() == mapped[1].data_ptr()
    converted = weights.take("b", (4,))
    assert converted.dtype == torch.float32
    assert weights.take("b", (4,), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_float32_model_is_used_where_it_is_mapped_but_for_packed_layers(checkpoint):
    model = load_model(checkpoint)
    size = (checkpoint / "model.safetensors").stat().st_size
    for block in model.layers.blocks:
        assert abs(block.norm.data_ptr() - model.embeddings.data_ptr()) < size
    layers = (model.layers.blocks[0].mixers[0].in_proj, model.lm_head)
    assert all(layer.weight is None for layer in layers), "a second copy"
    experts = model.layers.blocks[1].mixers[0].experts
    assert not any(isinstance(value, torch.Tensor) for value in vars(experts).values()), "a second copy"


def test_a_missing_tensor_is_named_with_its_shape(two_files):
    with pytest.raises(ModelLoadError, match=r"lacks tensor d of shape \[7, 1\]"):
        WeightFiles(two_files).take("d", (7, 1))


def test_a_misshapen_tensor_is_named_with_both_shapes(two_files):
    with pytest.raises(
        ModelLoadError, match=r"1\.safetensors: tensor a has shape \[2, 3\]; expected \[3, 2\]"
    ):
        WeightFiles(two_files).take("a", (3, 2))


def test_a_quantised_tensor_is_refused_by_name(tmp_path):
    save_file({"a": torch.ones(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="tensor a is stored as I8"):
        WeightFiles(tmp_path).take("a", (2,))


def test_a_directory_without_safetensors_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="holds no safetensors file"):
        WeightFiles(tmp_path)


def test_an_index_that_names_a_missing_file_is_refused(two_files):
    (two_files / "2.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"names files that are not there: 2\.safetensors"):
        WeightFiles(two_files)


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_broken_index_is_named(two_files, content):
    (two_files / INDEX_NAME).write_text(content)
    with pytest.raises(ModelLoadError, match="not a safetensors index"):
        WeightFiles(two_files)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100])
def test_a_broken_file_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is not a readable safetensors file"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "backbone.embeddings.weight",
        "backbone.norm_f.weight",
        "lm_head.weight",
        "backbone.layers.0.mixer.conv1d.bias",
        "backbone.layers.0.mixer.A_log",
        "backbone.layers.1.mixer.gate.e_score_correction_bias",
        "backbone.layers.1.mixer.experts.11.down_proj.weight",
        "backbone.layers.1.mixer.fc2_latent_proj.weight",
        "backbone.layers.2.mixer.v_proj.weight",
        "backbone.layers.5.mixer.up_proj.weight",
    ],
)
def test_a_model_names_the_tensor_that_is_missing_or_misshapen(checkpoint, tmp_path, name):
    directory = shutil.copytree(checkpoint, tmp_path / "copy")
    rewrite(directory, **{name: None})
    with pytest.raises(ModelLoadError, match=f"lacks tensor {name}"):
        load_model(directory)
    rewrite(directory, **{name: torch.zeros(3, 1)})
    with pytest.raises(ModelLoadError, match=rf"tensor {name} has shape \[3, 1\]"):
        load_model(directory)


def test_fingerprint_is_equal_for_a_copy_and_differs_by_dtype(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    first = fingerprint(checkpoint, torch.float32)
    assert first == fingerprint(copy, "float32")
    assert len(first) == 64
    assert first != fingerprint(checkpoint, torch.bfloat16)


def test_fingerprint_notices_a_change_of_config_or_of_any_tensor(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    first = fingerprint(copy, "float32")
    name = "backbone.layers.1.mixer.experts.7.up_proj.weight"
    original = load_file(copy / "model.safetensors")[name]
    rewrite(copy, **{name: original * 1.001})
    assert fingerprint(copy, "float32") != first
    rewrite(copy, **{name: original})
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"routed_scaling_factor": 9.0}))
    assert fingerprint(copy, "float32") != first


def test_fingerprint_ignores_who_saved_the_config(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"transformers_version": "4.51.0"}))
    assert fingerprint(copy, "float32") == fingerprint(checkpoint, "float32")


def test_fingerprint_of_another_seed_differs(tmp_path):
    first, second = (make_checkpoint(tmp_path / str(seed), DENSE, seed=seed) for seed in (0, 1))
    assert fingerprint(first, "float32") != fingerprint(second, "float32")


def test_fingerprint_names_a_broken_file(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json can't be read"):
        fingerprint(tmp_path, "float32")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is not a readable"):
        fingerprint(tmp_path, "float32")
