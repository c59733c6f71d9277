"""Linear layers, with packed weights and with weights as loaded."""

from __future__ import annotations

import pytest
import torch

from engine.models.layers.linear import Linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(7, 5), (160, 96), (1024, 512)])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 32, 33, 1000])
def test_equals_float64(num_rows, out_features, in_features, bias):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator)
    offset = torch.randn(out_features, generator=generator) if bias else None
    wide = torch.randn(num_rows, in_features + 3, generator=generator)
    x = wide[:, :in_features]  # rows further apart than they are long
    layer = Linear(weight, offset)
    with torch.inference_mode():
        y, activated = layer(x), layer.relu_squared(x)
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(activated, y.relu().square(), rtol=0, atol=0)


def test_a_row_is_the_same_bits_in_every_batch():
    generator = torch.Generator().manual_seed(0)
    layer = Linear(torch.randn(200, 300, generator=generator))
    x = torch.randn(3000, 300, generator=generator)  # several blocks of rows
    alone = torch.cat([layer(x[i : i + 1]) for i in range(0, 3000, 7)])
    for num_rows in (2, 5, 9, 13, 3000):
        expected = alone[: 1 + (num_rows - 1) // 7]
        assert torch.equal(layer(x[:num_rows])[::7], expected)


def test_nan_and_infinity_come_out_behind_the_activation():
    x = torch.ones(1, 4)
    weight = torch.tensor([[float("nan")] * 4, [float("inf")] * 4, [-float("inf")] * 4])
    y = Linear(weight).relu_squared(x)[0].tolist()
    assert str(y) == "[nan, inf, 0.0]"


def test_joined_layers_stand_one_behind_the_other(tmp_path):
    class Files:
        dtype = torch.float32
        batch_invariant = False
        weight_dtype = "float32"

        def take_weight(self, layer, shape, *, part):
            return torch.full(shape, float(len(layer)))

    joined = Linear.take_joined(Files(), [("a", 2, None), ("bcd", 1, None)], 4)
    assert joined(torch.ones(1, 4)).tolist() == [[4.0, 4.0, 12.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.5, torch.tensor([1.0, 2.0, -4.0])], ids=["one", "each"])
def test_a_scale_holds_for_the_bias_too(scale, dtype):
    layer = Linear(torch.ones(3, 4, dtype=dtype), torch.ones(3, dtype=dtype), scale=scale)
    expected = (5.0 * scale * torch.ones(3)).tolist()
    assert layer(torch.ones(1, 4, dtype=dtype)).tolist() == [expected]


def test_a_batch_invariant_layer_in_bfloat16_rounds_once_and_gives_a_row_the_same_bits_in_every_batch():
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(50, 96, generator=generator), torch.randn(9, 96, generator=generator)
    weight, x = weight.bfloat16(), x.bfloat16()
    layer = Linear(weight, torch.ones(50).bfloat16(), batch_invariant=True)
    together = layer(x)
    assert together.dtype == torch.bfloat16
    assert torch.equal(torch.cat([layer(row) for row in x.split(1)]), together)
    expected = torch.nn.functional.linear(x.double(), weight.double(), torch.ones(50).double())
    torch.testing.assert_close(together.double(), expected, rtol=2**-8, atol=1e-4)


def test_bfloat16_stays_with_torch():
    layer = Linear(torch.ones(1024, 1024, dtype=torch.bfloat16))
    assert layer.packed is None
    x = torch.ones(2, 1024, dtype=torch.bfloat16)
    assert torch.equal(layer(x).float(), torch.full((2, 1024), 1024.0))
