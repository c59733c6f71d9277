"""Float32 products on CPU: against float64, and the same bits for a row in every batch."""

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
