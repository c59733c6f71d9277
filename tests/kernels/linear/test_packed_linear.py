"""Products on CPU with weights in float32 and bfloat16: against float64, and a row's bits in every batch."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.packed_linear import PackedLinear, linear_reference

OUTPUTS = 130
MANY_ROWS = 300
"""With 700 inputs these are a block of 186 rows and one of 114; with 2,300 inputs five of 54 and one of 30,
which takes panels in parts."""


def layer_and_rows(num_inputs):
    generator = torch.Generator().manual_seed(num_inputs)
    weight = torch.randn(OUTPUTS, num_inputs, generator=generator) / num_inputs**0.5
    bias = torch.randn(OUTPUTS, generator=generator)
    wide = torch.randn(MANY_ROWS, num_inputs + 3, generator=generator)
    return weight, bias, wide[:, :num_inputs]  # rows further apart than they are long


@pytest.mark.parametrize("num_inputs", [5, 256, 700, 2300])
@pytest.mark.parametrize("relu_squared", [False, True], ids=["identity", "relu_squared"])
def test_equals_float64(num_inputs, relu_squared):
    weight, bias, x = layer_and_rows(num_inputs)
    product = PackedLinear.pack(weight, bias)(x, relu_squared=relu_squared)
    expected = linear_reference(x.double(), weight.double(), bias.double(), relu_squared=relu_squared)
    torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_inputs", [256, 700, 2300])
def test_a_row_has_the_same_bits_in_every_batch(num_inputs):
    weight, bias, x = layer_and_rows(num_inputs)
    layer = PackedLinear.pack(weight, bias)
    alone = torch.cat([layer(row[None]) for row in x])
    for num_rows in (2, 6, 7, 8, 11, 12, 13, 31, 48, 49, 55, 130, MANY_ROWS):
        assert torch.equal(layer(x[:num_rows]), alone[:num_rows]), num_rows


@pytest.mark.parametrize("num_inputs", [5, 256, 700, 2300])
@pytest.mark.parametrize("relu_squared", [False, True], ids=["identity", "relu_squared"])
def test_a_bfloat16_weight_takes_two_bytes_and_has_the_bits_of_its_float32(num_inputs, relu_squared):
    weight, bias, x = layer_and_rows(num_inputs)
    narrow = PackedLinear.pack(weight.bfloat16(), bias)
    wide = PackedLinear.pack(weight.bfloat16().float(), bias)
    assert 2 * narrow.panels.nbytes == wide.panels.nbytes
    for num_rows in (1, 4, 6, 7, 8, 12, 31, 48, 49, MANY_ROWS):
        rows = x[:num_rows]
        assert torch.equal(narrow(rows, relu_squared=relu_squared), wide(rows, relu_squared=relu_squared))


def test_not_a_number_and_infinity_stay_what_they_are_in_bfloat16():
    weight = torch.tensor([[float("nan")] * 4, [float("inf")] * 4, [-float("inf")] * 4]).bfloat16()
    assert str(PackedLinear.pack(weight, None)(torch.ones(1, 4))[0].tolist()) == "[nan, inf, -inf]"


@pytest.mark.parametrize("num_outputs", [1, 16, 17, 130])
def test_an_output_has_the_same_bits_however_many_follow_it(num_outputs):
    """The last panel may be computed in tiles of one register, if that holds its outputs."""
    weight, bias, x = layer_and_rows(700)
    more = torch.cat([weight, weight.flip(0)])
    whole = PackedLinear.pack(more, torch.cat([bias, bias]))(x)
    part = PackedLinear.pack(more[:num_outputs], bias[:num_outputs])(x)
    assert torch.equal(part, whole[:, :num_outputs])
