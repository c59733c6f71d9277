"""Weights of one byte, cut and put together: every element keeps its value and its scale."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.linear.quantized_weight import FP8, QuantizedWeight, join, quantized_by_rows
from testing.kernels.quantized_weights import BLOCKS, random_weight

RANGES = [[(0, 12)], [(12, 24)], [(8, 16), (32, 40)], [(0, 7), (13, 50)], [(40, 50), (0, 10)], [(0, 50)]]


@pytest.mark.parametrize("stored", [FP8, torch.int8], ids=["fp8", "int8"])
@pytest.mark.parametrize("block", [*BLOCKS.values(), (8, 8), (4, 16)], ids=str)
@pytest.mark.parametrize("ranges", RANGES, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_cut_is_the_cut_of_the_dequantised_weight(stored, block, ranges, axis):
    weight = random_weight(stored, 50, 50, block)
    indices = torch.cat([torch.arange(*one) for one in ranges])
    assert torch.equal(
        weight.cut(axis, ranges).dequantized(), weight.dequantized().index_select(axis, indices)
    )


def test_a_cut_on_block_borders_keeps_the_blocks():
    cut = random_weight(FP8, 512, 512, (128, 128)).cut(0, [(128, 256), (384, 512)]).cut(1, [(256, 512)])
    assert (cut.block_rows, cut.block_columns, cut.scales.shape) == (128, 128, (2, 2))


def test_a_cut_beside_block_borders_makes_the_largest_blocks_that_fit():
    cut = random_weight(FP8, 512, 512, (128, 128)).cut(1, [(192, 320)])
    assert (cut.block_columns, cut.scales.shape) == (64, (4, 2))


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([*BLOCKS.values(), (4, 8)])), min_size=1, max_size=4
    )
)
def test_joined_weights_are_the_dequantised_ones_behind_each_other(parts):
    weights = [random_weight(FP8, rows, 24, block, seed=i) for i, (rows, block) in enumerate(parts)]
    expected = torch.cat([one.dequantized() for one in weights])
    assert torch.equal(join(weights).dequantized(), expected)


def test_joined_tensors_with_a_scale_each_share_it_in_large_blocks():
    heads = [random_weight(FP8, rows, 64, BLOCKS["tensor"]) for rows in (256, 64, 64)]
    assert join(heads).block_rows == 64


def test_outputs_are_multiplied_by_factors_of_their_own():
    weight = random_weight(torch.int8, 6, 8, (4, 4))
    factors = torch.arange(1.0, 7.0)
    torch.testing.assert_close(weight.scaled(factors).dequantized(), weight.dequantized() * factors[:, None])
    torch.testing.assert_close(weight.scaled(3.0).dequantized(), weight.dequantized() * 3)


@pytest.mark.parametrize("stored", [FP8, torch.int8], ids=["fp8", "int8"])
def test_padding_adds_outputs_that_are_zero(stored):
    weight = random_weight(stored, 5, 8, (2, 4))
    padded = weight.rows_padded(8).dequantized()
    assert torch.equal(padded[:5], weight.dequantized())
    assert not padded[5:].any()
    assert weight.rows_padded(5) is weight


def test_every_fp8_code_is_its_value():
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).view(FP8)
    one = QuantizedWeight(codes, torch.ones(1, 1), 1, 256)
    torch.testing.assert_close(one.dequantized()[0], codes[0].float(), equal_nan=True, rtol=0, atol=0)


def test_a_row_is_rounded_to_int8_by_its_largest_weight():
    weight = torch.randn(9, 30, dtype=torch.float64).float()
    weight[3] = 0
    weight[4, 7] = -50
    found = quantized_by_rows(weight)
    assert (found.values.dtype, tuple(found.scales.shape), found.block_columns) == (torch.int8, (9, 1), 30)
    error = (found.dequantized() - weight).abs()
    assert (error <= 0.5001 * found.scales).all()
    assert found.values[4, 7] == -127
    assert torch.equal(found.dequantized()[3], torch.zeros(30))
