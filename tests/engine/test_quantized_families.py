"""Every family with quantised weights: layer by layer, and in its logits, the dequantised checkpoint's."""

from __future__ import annotations

import pytest
import torch

from engine.models import load_model, read_config
from engine.tensor_parallel import ALONE, TensorParallel
from engine.weight_size import weight_bytes
from kernels.quantized_linear import QuantizedLinear
from tests.engine.model_layers import linears
from tests.engine.sequences import Driver, Sequence
from tests.families import CASES, family_logits, make_family_checkpoint
from tests.quantized_checkpoints import dequantized, write_quantized

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
