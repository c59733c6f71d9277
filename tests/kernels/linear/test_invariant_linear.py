"""Products whose rows have the same bits in every batch: against float64, and in many batches."""

import pytest
import torch

from kernels.linear import invariant_linear as module
from kernels.linear.invariant_linear import invariant_linear_reference, tile_request
from kernels.linear.packed_linear import PackedLinear
from testing.kernels.interpreted import skip_bfloat16_in_the_interpreter

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE)
SHAPES = pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "num_parts"),
    [pytest.param(130, 1100, 2, marks=pytest.mark.exhaustive), (70, 96, 1), (3, 5, 1), (40, 2060, 4)],
)


def operands(target, num_rows, num_outputs, num_inputs, dtype=torch.float32):
    """x has rows that are further apart than they are long, with NaN between them."""
    generator = torch.Generator().manual_seed(num_rows + num_outputs)
    wide = torch.full((num_rows, num_inputs + 3), torch.nan)
    wide[:, :num_inputs] = torch.randn(num_rows, num_inputs, generator=generator)
    weight = torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5
    bias = torch.randn(num_outputs, generator=generator)
    wide, weight, bias = (t.to(target.device, dtype) for t in (wide, weight, bias))
    return wide[:, :num_inputs], weight, bias


def product(target, x, weight, bias=None):
    """The op of each device that keeps the promise."""
    skip_bfloat16_in_the_interpreter(target, x.dtype)
    if target.name == "triton":
        return module._launch(x, weight, bias)
    return PackedLinear.pack(weight, bias)(x)


@DTYPES
@SHAPES
@pytest.mark.parametrize("num_rows", [0, 1, 70])
def test_equals_float64(target, num_rows, num_outputs, num_inputs, num_parts, dtype):
    x, weight, bias = operands(target, num_rows, num_outputs, num_inputs, dtype)
    assert tile_request(dtype, num_outputs, num_inputs).default["PARTS"] == num_parts
    for with_bias in (None, bias):
        y = product(target, x, weight, with_bias)
        assert y.dtype == dtype
        wide_bias = None if with_bias is None else bias.double()
        expected = invariant_linear_reference(x.double(), weight.double(), wide_bias)
        torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
@SHAPES
def test_a_row_has_the_same_bits_alone_and_among_any_others(
    target, num_outputs, num_inputs, num_parts, dtype
):
    x, weight, bias = operands(target, 70, num_outputs, num_inputs, dtype)
    together = product(target, x, weight, bias)
    for sizes in ([1] * 3 + [67], [69, 1]):
        apart = torch.cat([product(target, rows, weight, bias) for rows in x.split(sizes)])
        assert torch.equal(apart, together), sizes
    assert torch.equal(product(target, x.flip(0), weight, bias).flip(0), together)


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
def test_parts_have_the_same_sum_in_one_program_and_in_several(target, monkeypatch, dtype, has_bias):
    if target.name != "triton":
        pytest.skip("only the Triton kernel has parts")
    x, weight, bias = operands(target, 70, 40, 2060, dtype)
    results = []
    for many_tiles in (1, 1000):
        monkeypatch.setattr(module, "MANY_TILES", many_tiles)
        results.append(product(target, x, weight, bias if has_bias else None))
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "bfloat16_parts"),
    [(4096, 8192, 8), (6144, 4096, 4), (21504, 4096, 1), (131072, 4096, 1), (128, 2688, 4), (1, 64, 1)],
)
def test_parts_fill_a_gpu_and_cover_the_inputs(num_outputs, num_inputs, bfloat16_parts, dtype):
    tiles = tile_request(dtype, num_outputs, num_inputs).default
    columns = -(-num_outputs // tiles["BLOCK_N"])
    if dtype == torch.bfloat16:
        assert tiles["PARTS"] == bfloat16_parts
    assert tiles["PARTS"] == 1 or (num_inputs // tiles["PARTS"] >= 512 and tiles["PARTS"] * columns <= 256)
