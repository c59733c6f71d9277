"""Models of quantised checkpoints give the results of the same weights in float32, for each format."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.fingerprint import fingerprint
from engine.checkpoint.weights import WeightFiles
from engine.cost.weight_size import weight_bytes
from engine.models import build_model, load_model, read_config
from engine.models.causal_lm import head_rows
from engine.models.layers.expert_weights import NEMOTRON_EXPERTS, load_experts
from engine.models.layers.linear import Linear
from engine.models.layers.moe import LoopedExperts, StackedExperts
from engine.parallel.tensor_parallel import ALONE, TensorParallel
from engine.step.passes.recorded_forward import RecordedForward
from kernels.linear.quantized_linear import QuantizedLinear
from kernels.linear.quantized_weight import QuantizedWeight
from testing.checkpoints.loading_lines import loading_lines
from testing.checkpoints.quantized import FORMATS, dequantized, write_quantized
from testing.checkpoints.random_checkpoint import (
    DENSE,
    MOE_WITH_MTP,
    make_checkpoint,
    transformers_logits,
)
from testing.engines.model_layers import linears
from testing.engines.sequences import Driver, Sequence
from wire.errors import ModelLoadError

LAYER = "backbone.layers.1.mixer.q_proj"
"""Of the checkpoints below, quantised in all formats."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    shape = replace(MOE_WITH_MTP, pattern="M*EM-", use_bias=True, mlp_bias=True)
    return make_checkpoint(tmp_path_factory.mktemp("source"), shape, seed=3)


@pytest.fixture(scope="module", params=FORMATS)
def checkpoint(request, source, tmp_path_factory):
    return write_quantized(source, tmp_path_factory.mktemp("quantised") / "model", request.param)


@pytest.fixture
def modelopt(source, tmp_path):
    """A copy to spoil."""
    return write_quantized(source, tmp_path / "model", "modelopt")


def logits_of(model) -> torch.Tensor:
    """Of one sequence: two chunks, and rows of decoding."""
    driver, sequence = Driver(model, 1), Sequence(0, [(7 * i) % 157 for i in range(40)])
    return torch.cat([driver.step([(sequence, n)])[0] for n in (20, 15, 1, 1, 3)])


def test_logits_and_greedy_tokens_are_those_of_transformers(source, checkpoint):
    model = load_model(checkpoint)
    ids = [(7 * i) % 157 for i in range(40)]
    expected = transformers_logits(dequantized(checkpoint), ids)
    found = logits_of(model)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    # And not those of the weights before they were quantised.
    original = transformers_logits(source, ids)
    assert (found - original).abs().max() > 1e-3 * original.abs().max()


@pytest.mark.parametrize(
    "ranks", [ALONE, TensorParallel(0, 2), TensorParallel(1, 2)], ids=["alone", "first", "second"]
)
def test_every_layer_has_the_bits_of_the_dequantised_one(checkpoint, ranks):
    """Of a rank's part too; cuts fall beside block borders: heads of 16, blocks of 24."""
    paths = checkpoint, dequantized(checkpoint)
    quantised, plain = (linears(load_model(path, mtp=True, tp=ranks)) for path in paths)
    assert sum(isinstance(layer.packed, QuantizedLinear) for layer in quantised) > 20
    for ours, expected in zip(quantised, plain, strict=True):
        x = torch.randn(3, expected.in_features)
        assert torch.equal(ours(x), expected(x))


def test_a_joined_projection_may_have_parts_that_are_not_quantised(source, tmp_path, caplog):
    path = write_quantized(source, tmp_path / "model", "block fp8", excluded=("k_proj",))
    with caplog.at_level(logging.INFO):
        model = load_model(path)
    assert "3 weights that belong together are quantised differently" in caplog.text
    for ours, expected in zip(linears(model), linears(load_model(dequantized(path))), strict=True):
        x = torch.randn(3, expected.in_features)
        assert torch.equal(ours(x), expected(x))


def test_a_quantised_output_head_is_divided_among_ranks(source, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "testing.checkpoints.quantized.NEVER_QUANTIZED", ("embed", "norm", "conv1d", ".gate.")
    )
    path = write_quantized(source, tmp_path / "model", "packed int8 group")
    hidden = torch.randn(2, 64)
    for ranks in (ALONE, TensorParallel(0, 3), TensorParallel(2, 3)):
        quantised, plain = (output_head(each, ranks) for each in (path, dequantized(path)))
        assert isinstance(quantised.packed, QuantizedLinear)
        assert torch.equal(quantised(hidden), plain(hidden))


def output_head(path: Path, ranks: TensorParallel) -> Linear:
    config = read_config(path)
    weights = WeightFiles(path, quantization=config.quantization)
    return Linear(head_rows(config, weights, ranks, tied=torch.empty(0)))


class CountedWeights(WeightFiles):
    """Adds up what is taken, in the dtype in which it is kept."""

    num_bytes = 0

    def take(self, name, shape, **wanted):
        tensor = super().take(name, shape, **wanted)
        self.num_bytes += tensor.nbytes
        return tensor

    def take_weight(self, layer, shape, **wanted):
        weight = super().take_weight(layer, shape, **wanted)
        if isinstance(weight, QuantizedWeight):
            self.num_bytes += weight.nbytes
        return weight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_size_by_configuration_is_what_the_loader_takes(checkpoint, dtype):
    config = read_config(checkpoint, dtype)
    for ranks, mtp in ((ALONE, True), (TensorParallel(1, 2), False)):
        weights = CountedWeights(checkpoint, dtype=config.dtype, quantization=config.quantization)
        build_model(config, weights, mtp=mtp, tp=ranks)
        assert weight_bytes(config, ranks, mtp=mtp) == weights.num_bytes


def test_nothing_in_the_files_is_called_unknown(checkpoint, caplog):
    with caplog.at_level(logging.WARNING):
        load_model(checkpoint, mtp=True)
    assert loading_lines(caplog) == []


def test_what_is_stored_counts_and_is_said_where_the_configuration_differs(modelopt, caplog):
    weight = load_file(dequantized(modelopt) / "model.safetensors")[f"{LAYER}.weight"]
    rewrite(modelopt, **{f"{LAYER}.weight": weight, f"{LAYER}.weight_scale": None})
    with caplog.at_level(logging.WARNING):
        model = load_model(modelopt)
    assert f"{LAYER} is stored not quantised, but quantised according to its configuration" in caplog.text
    assert not isinstance(model.layers.blocks[1].mixers[0].qkv.proj.packed, QuantizedLinear)


@pytest.fixture(scope="module", params=["block fp8", "packed int8 group"])
def dense_checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("dense")
    return write_quantized(make_checkpoint(directory / "source", DENSE), directory / "model", request.param)


def test_steps_can_be_recorded(dense_checkpoint):
    assert RecordedForward.obstacle(load_model(dense_checkpoint)) is None


def test_bfloat16_on_a_cpu_stays_near_float32(dense_checkpoint):
    models = (load_model(dense_checkpoint, dtype=dtype) for dtype in ("float32", "bfloat16"))
    exact, rounded = map(logits_of, models)
    assert (exact - rounded).norm() < 0.1 * exact.norm()


def test_stacked_experts_equal_looped_experts(checkpoint):
    """The GPU's grouped products, interpreted."""
    model = load_model(checkpoint)
    config = model.config
    moe = model.layers.blocks[2].mixers[0]
    weights = WeightFiles(checkpoint, quantization=config.quantization)
    size = config.moe.latent_size or config.hidden_size
    matrices = load_experts(config.moe, size, weights, "backbone.layers.2.mixer.", ALONE, NEMOTRON_EXPERTS)
    assert all(isinstance(matrix, QuantizedWeight) for matrix in matrices[0])
    looped, stacked = (make(*matrices, config.moe.activation) for make in (LoopedExperts, StackedExperts))
    for num_tokens in (1, 50):
        x = torch.randn(num_tokens, config.hidden_size)
        ids, expert_weights = moe.route(x)
        torch.testing.assert_close(
            stacked.forward(x, ids, expert_weights),
            looped.forward(x, ids, expert_weights),
            rtol=1e-4,
            atol=1e-5,
        )


def test_dummy_weights_are_quantised_as_the_checkpoint_is(checkpoint, tmp_path):
    for name in ("config.json", "hf_quant_config.json"):
        if (checkpoint / name).exists():
            shutil.copy(checkpoint / name, tmp_path)
    model = load_model(tmp_path, load_format="dummy", mtp=True)
    assert len([layer for layer in linears(model) if isinstance(layer.packed, QuantizedLinear)]) > 20
    logits = logits_of(model)
    assert 2 < logits.std() < 8
    assert logits.isfinite().all()


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


@pytest.mark.parametrize(
    ("kind", "tensor", "message"),
    [
        ("weight_scale", None, rf"{LAYER} is quantised and lacks {LAYER}\.weight_scale"),
        (
            "weight_scale",
            torch.ones(3, 2),
            r"float32 of shape \[3, 2\]; expected shape \[1, 1\], as the checkpoint",
        ),
        ("weight_scale", torch.tensor(float("nan")), r"q_proj\.weight_scale is not finite"),
        ("weight_scale", torch.ones(1, dtype=torch.int32), "expected a floating point dtype"),
        ("weight", torch.zeros(3, 4).to(torch.float8_e4m3fn), r"of shape \[3, 4\]; expected \[64, 64\]"),
        ("weight", torch.full((64, 64), torch.nan).to(torch.float8_e4m3fn), r"q_proj\.weight holds NaN"),
        ("weight", torch.zeros(64, 64, dtype=torch.int8), "is stored as I8, and neither quantization_config"),
        ("weight", torch.zeros(64, 64, dtype=torch.uint8), "is stored as U8"),
        ("weight_zero_point", torch.ones(64, 1, dtype=torch.int8), "weight_zero_point is not zero"),
        ("weight_g_idx", torch.arange(64), "weight_g_idx is not zero"),
    ],
)
def test_what_is_wrong_with_a_quantised_layer_is_named(modelopt, kind, tensor, message):
    rewrite(modelopt, **{f"{LAYER}.{kind}": tensor})
    with pytest.raises(ModelLoadError, match=message):
        load_model(modelopt)


def test_a_packed_weight_of_another_shape_is_named(source, tmp_path):
    path = write_quantized(source, tmp_path / "model", "packed int8 channel")
    rewrite(path, **{f"{LAYER}.weight_shape": torch.tensor([64, 60])})
    with pytest.raises(ModelLoadError, match=r"weight_shape says \[64, 60\]; expected \[64, 64\]"):
        load_model(path)
    rewrite(path, **{f"{LAYER}.weight_packed": torch.zeros(64, 8, dtype=torch.int32)})
    with pytest.raises(
        ModelLoadError, match=r"weight_packed is int32 of shape \[64, 8\]; expected \[64, 16\]"
    ):
        load_model(path)


def test_quantised_tensors_without_a_configuration_are_refused(modelopt):
    path = modelopt / "config.json"
    fields = json.loads(path.read_text())
    del fields["quantization_config"]
    path.write_text(json.dumps(fields))
    with pytest.raises(
        ModelLoadError, match="is stored as F8_E4M3, and neither quantization_config in config"
    ):
        load_model(modelopt)


def test_a_quantised_embedding_is_refused_by_name(modelopt):
    rewrite(modelopt, **{"backbone.embeddings.weight": torch.zeros(160, 64, dtype=torch.int8)})
    with pytest.raises(ModelLoadError, match=r"backbone\.embeddings\.weight is stored as I8"):
        load_model(modelopt)


def test_the_fingerprint_covers_how_weights_are_quantised(source, tmp_path):
    path = write_quantized(source, tmp_path / "model", "modelopt beside")
    first = fingerprint(path, "float32")
    beside = path / "hf_quant_config.json"
    content = json.loads(beside.read_text())
    content["quantization"]["exclude_modules"].append("something")
    beside.write_text(json.dumps(content))
    assert fingerprint(path, "float32") != first


@pytest.mark.parametrize("names", [("k_proj.k_scale", "v_proj.v_scale"), ("k_scale", "v_scale")])
def test_scales_of_keys_and_values_are_read_and_only_used_in_float8(source, tmp_path, names):
    path = write_quantized(source, tmp_path / "model", "compressed fp8 tensor")
    mixer = "backbone.layers.1.mixer."
    rewrite(
        path, **{mixer + name: torch.tensor([scale]) for name, scale in zip(names, (0.5, 0.25), strict=True)}
    )
    model = load_model(path)
    attention = model.layers.blocks[1].mixers[0]
    assert (attention.k_scale, attention.v_scale) == (0.5, 0.25)
    expected = logits_of(load_model(dequantized(path)))
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)
    rewrite(path, **{mixer + names[0]: torch.ones(2)})
    with pytest.raises(ModelLoadError, match=f"{names[0]} is not one finite number"):
        load_model(path)
