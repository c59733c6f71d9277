"""Weights that a CPU keeps in fewer bytes give the results of the same rounded weights in float32."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from engine.checkpoint.fingerprint import fingerprint
from engine.cost.weight_size import weight_bytes
from engine.models import load_model, read_config
from engine.models.layers.moe import GroupedExperts
from engine.parallel.tensor_parallel import ALONE, TensorParallel
from engine.step.passes.recorded_forward import RecordedForward
from kernels.linear.quantized_linear import QuantizedLinear
from kernels.linear.quantized_weight import quantized_by_rows
from testing.checkpoints.changed_weights import with_changed_weights
from testing.checkpoints.random_checkpoint import DENSE, MOE_WITH_MTP, make_checkpoint
from testing.engines.model_layers import linears
from testing.engines.sequences import Driver, Sequence
from wire.errors import ConfigError

RANKS = pytest.mark.parametrize("ranks", [ALONE, TensorParallel(1, 2)], ids=["alone", "second of two"])


@pytest.fixture(scope="module", params=["one by one", "stacked"])
def source(request, tmp_path_factory):
    """A checkpoint with experts, which are stored in either way."""
    is_published = request.param == "one by one"
    directory = tmp_path_factory.mktemp("source")
    return make_checkpoint(directory, MOE_WITH_MTP, seed=5, published_names=is_published)


def rounded(weight: Tensor) -> Tensor:
    return weight.bfloat16().float()


def logits_of(model) -> Tensor:
    """Of one sequence: two chunks, and rows of decoding."""
    driver, sequence = Driver(model, 1), Sequence(0, [(7 * i) % 157 for i in range(40)])
    return torch.cat([driver.step([(sequence, n)])[0] for n in (20, 15, 1, 1, 3)])


@RANKS
def test_bfloat16_has_the_bits_of_rounded_weights_in_float32(source, tmp_path, ranks):
    plain = load_model(with_changed_weights(source, tmp_path / "rounded", rounded), mtp=True, tp=ranks)
    narrow = load_model(source, mtp=True, tp=ranks, weight_dtype="bfloat16")
    for ours, expected in zip(linears(narrow), linears(plain), strict=True):
        x = torch.randn(3, expected.in_features)
        assert torch.equal(ours(x), expected(x))
    experts = [
        block.mixers[0].experts for block in narrow.layers.blocks if hasattr(block.mixers[0], "experts")
    ]
    assert all(isinstance(one, GroupedExperts) and one.up.panels.itemsize == 2 for one in experts)
    if ranks is ALONE:
        assert torch.equal(logits_of(narrow), logits_of(plain))
        assert not torch.equal(logits_of(narrow), logits_of(load_model(source)))


@RANKS
def test_int8_has_the_bits_of_rounded_weights_in_float32_on_every_rank(source, tmp_path, ranks):
    path = with_changed_weights(
        source, tmp_path / "rounded", lambda weight: quantized_by_rows(weight).dequantized()
    )
    plain = load_model(path, mtp=True, tp=ranks)
    narrow = load_model(source, mtp=True, tp=ranks, weight_dtype="int8")
    layers = linears(narrow)
    assert sum(isinstance(layer.packed, QuantizedLinear) for layer in layers) > 20
    x = torch.randn(3, plain.lm_head.in_features)
    assert torch.equal(narrow.lm_head(x), plain.lm_head(x))
    if ranks is ALONE:
        torch.testing.assert_close(logits_of(narrow), logits_of(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", [0, 1])
def test_auto_keeps_bfloat16_only_where_that_loses_nothing(tmp_path, seed):
    path = make_checkpoint(tmp_path / "float32", DENSE, seed=seed)
    stored = with_changed_weights(path, tmp_path / "bfloat16", rounded)
    for each, itemsize in ((path, 4), (stored, 2)):
        config = json.loads((each / "config.json").read_text())
        (each / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
        ours, plain = (load_model(each, weight_dtype=kept) for kept in ("auto", "float32"))
        assert {layer.packed.panels.itemsize for layer in linears(ours)} == {itemsize}
        assert {layer.packed.panels.itemsize for layer in linears(plain)} == {4}
        assert torch.equal(logits_of(ours), logits_of(plain))


def test_the_bundled_model_is_stored_in_bfloat16_and_answers_as_in_float32(bundled_model):
    expected = logits_of(load_model(bundled_model, weight_dtype="float32"))
    for kept in ("auto", "bfloat16"):
        model = load_model(bundled_model, weight_dtype=kept)
        assert {layer.packed.panels.itemsize for layer in linears(model)} == {2}
        assert torch.equal(logits_of(model), expected)
    rounded_more = logits_of(load_model(bundled_model, weight_dtype="int8"))
    assert (rounded_more - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
def test_steps_can_be_recorded(tmp_path, kept):
    model = load_model(make_checkpoint(tmp_path, DENSE), weight_dtype=kept)
    assert RecordedForward.obstacle(model) is None


def test_the_size_by_configuration_counts_what_layers_keep(source):
    def size(kept, dtype="auto"):
        return weight_bytes(read_config(source, dtype, "cpu", kept), mtp=True)

    linear = (size("float32") - size("bfloat16")) / 2
    assert 0.8 < linear / (size("float32") / 4) < 1.0
    scales = size("int8") - (size("float32") - 3 * linear)
    assert 0 < scales < 0.1 * linear * 4
    assert size("auto") == size("float32")  # the checkpoint is stored in float32


def test_the_size_of_a_bfloat16_checkpoint_is_known(tmp_path):
    path = make_checkpoint(tmp_path, DENSE, dtype=torch.bfloat16)
    sizes = [weight_bytes(read_config(path, "auto", "cpu", kept)) for kept in ("auto", "bfloat16", "float32")]
    assert sizes[0] == sizes[1] < sizes[2]


def test_only_weights_that_round_change_the_fingerprint(source):
    digests = {
        kept: fingerprint(source, "float32", weight_dtype=kept)
        for kept in ("auto", "float32", "bfloat16", "int8")
    }
    assert digests["auto"] == digests["float32"] == fingerprint(source, "float32")
    assert len(set(digests.values())) == 3


@pytest.mark.parametrize(
    ("dtype", "device", "computes"),
    [("bfloat16", "cpu", "bfloat16 on cpu"), ("float32", "cuda", "float32 on cuda")],
)
def test_a_choice_that_does_not_exist_is_refused(source, dtype, device, computes):
    assert read_config(source, dtype, device).weight_dtype == "float32"
    with pytest.raises(ConfigError, match=rf"`weight_dtype` int8 .* computes in {computes}; leave it out"):
        read_config(source, dtype, device, "int8")


def test_an_unknown_value_is_named(source):
    with pytest.raises(ConfigError, match="must be one of auto, float32, bfloat16, int8, got 'fp4'"):
        read_config(source, "auto", "cpu", "fp4")
