"""Every family with quantised weights: layers and logits equal those of the dequantised checkpoint."""

from __future__ import annotations

import pytest
import torch

from engine.checkpoint.weights import WeightFiles
from engine.cost.weight_size import weight_bytes
from engine.models import load_model, read_config
from engine.models.families.granite_moe_hybrid import MOE_NAMES
from engine.models.layers.expert_weights import load_experts
from engine.parallel.expert_parallel import ExpertParallel
from engine.parallel.tensor_parallel import ALONE, TensorParallel
from kernels.linear.quantized_linear import QuantizedLinear
from kernels.linear.quantized_weight import QuantizedWeight
from testing.checkpoints.families import CASES, family_logits, make_family_checkpoint
from testing.checkpoints.quantized import dequantized, write_quantized
from testing.engines.model_layers import linears
from testing.engines.sequences import Driver, Sequence

FORMATS = {"nemotron-h": "modelopt", "bamba": "packed int8 group", "granite-4": "compressed fp8 channel"}
"""As these families are published; of the others FP8 in blocks."""
TOKENS = [(7 * i) % 157 for i in range(40)]


@pytest.fixture(scope="module", params=[name for name, case in CASES.items() if case.is_representative])
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("family")
    source = make_family_checkpoint(directory / "source", request.param, seed=2)
    return write_quantized(source, directory / "model", FORMATS.get(request.param, "block fp8"))


@pytest.mark.parametrize("ranks", [ALONE, TensorParallel(1, 2)], ids=["alone", "second of two"])
def test_every_layer_has_the_bits_of_the_dequantised_one(checkpoint, ranks):
    quantised, plain = (linears(load_model(path, tp=ranks)) for path in (checkpoint, dequantized(checkpoint)))
    assert sum(isinstance(layer.packed, QuantizedLinear) for layer in quantised) >= 8
    for ours, expected in zip(quantised, plain, strict=True):
        x = torch.randn(3, expected.in_features)
        # Factors of a family go into scales here and into weights there: they may differ in the last bit.
        torch.testing.assert_close(ours(x), expected(x), rtol=1e-5, atol=1e-5)


def test_logits_are_those_of_transformers_on_the_dequantised_checkpoint(checkpoint):
    driver, sequence = Driver(load_model(checkpoint), 1), Sequence(0, TOKENS)
    found = torch.cat([driver.step([(sequence, n)])[0] for n in (20, 15, 1, 1, 3)])
    expected = family_logits(dequantized(checkpoint), TOKENS)
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_the_size_by_configuration_counts_bytes(checkpoint):
    quantised, plain = (read_config(path) for path in (checkpoint, dequantized(checkpoint)))
    assert weight_bytes(quantised) < 0.75 * weight_bytes(plain)


@pytest.mark.parametrize("name", ["compressed fp8 channel", "modelopt", "packed int8 group", "block fp8"])
@pytest.mark.parametrize(
    "ranks",
    [ALONE, TensorParallel(1, 2), TensorParallel(1, 2, experts=ExpertParallel(1, 2, tp_rank=1, tp_size=2))],
    ids=["alone", "second of two", "half of the experts"],
)
def test_experts_in_one_tensor_stay_quantised_each_with_its_scales(tmp_path, name, ranks):
    source = make_family_checkpoint(tmp_path / "source", "granite-4", seed=2)
    directory = write_quantized(source, tmp_path / "model", name)
    found = []
    for path in (directory, dequantized(directory)):
        config = read_config(path)
        weights = WeightFiles(path, quantization=config.quantization)
        prefix = "model.layers.0.block_sparse_moe."
        found.append(load_experts(config.moe, config.hidden_size, weights, prefix, ranks, MOE_NAMES.experts))
    for ours, expected in zip(*found, strict=True):
        assert len(ours) == len(expected)
        for one, plain in zip(ours, expected, strict=True):
            assert isinstance(one, QuantizedWeight)
            assert torch.equal(one.dequantized(), plain)
