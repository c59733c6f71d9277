"""Products with weights of one byte: Triton kernel and CPU path against float64, and its bits."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.graph import CpuGraph
from kernels.formats.float8 import writable
from kernels.gpu.triton_jit import tl, triton_jit
from kernels.linear.packed_linear import PackedLinear
from kernels.linear.quantized_linear import (
    FEW_ROWS,
    QuantizedLinear,
    quantized_linear_reference,
    quantized_linear_triton,
    widen_weight,
)
from kernels.linear.quantized_linear_cpu import ROWS_IN_REGISTERS, PackedQuantizedLinear
from kernels.linear.quantized_weight import FP8
from testing.kernels.compiled import output_of
from testing.kernels.interpreted import skip_bfloat16_in_the_interpreter
from testing.kernels.quantized_weights import BLOCKS, random_weight

STORED = pytest.mark.parametrize("stored", [FP8, torch.int8], ids=["fp8", "int8"])


def operands(target, stored, num_rows, num_outputs, num_inputs, block, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    weight = random_weight(stored, num_outputs, num_inputs, block, device=target.device)
    wide = torch.randn(num_rows, num_inputs + 3, generator=generator).to(target.device, dtype)
    bias = torch.randn(num_outputs, generator=generator).to(target.device, dtype)
    return wide[:, :num_inputs], weight, bias  # rows further apart than they are long


def product(target, x, weight, bias, **options):
    if target.name == "triton":
        return quantized_linear_triton(x, weight, bias, **options)
    return QuantizedLinear(weight, bias)(x, **options)


@STORED
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"), [(1, 70, 96), (5, 7, 5), (19, 130, 64), (0, 3, 4)]
)
def test_equals_float64(target, stored, block, num_rows, num_outputs, num_inputs):
    x, weight, bias = operands(target, stored, num_rows, num_outputs, num_inputs, block)
    expected = quantized_linear_reference(x.double(), weight, bias.double())
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(product(target, x, weight, bias).double(), expected, **tolerance)
    activated = product(target, x, weight, None, relu_squared=True)
    expected = quantized_linear_reference(x.double(), weight, relu_squared=True)
    torch.testing.assert_close(activated.double(), expected, **tolerance)


@STORED
@pytest.mark.parametrize("block", [BLOCKS["tensor"], BLOCKS["block"]], ids=["tensor", "block"])
def test_bfloat16_inputs_are_rounded_nowhere_but_in_the_result(target, stored, block):
    skip_bfloat16_in_the_interpreter(target, torch.bfloat16)
    x, weight, bias = operands(target, stored, 19, 130, 64, block, torch.bfloat16)
    expected = quantized_linear_reference(x.double(), weight, bias.double())
    y = product(target, x, weight, bias)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("block", [BLOCKS["tensor"], BLOCKS["block"]], ids=["tensor", "block"])
def test_a_batch_invariant_row_has_the_same_bits_among_few_rows_and_many(target, block):
    x, weight, bias = operands(target, FP8, FEW_ROWS + 6, 70, 96, block)
    options = {"batch_invariant": True} if target.name == "triton" else {}
    together = product(target, x, weight, bias, **options)
    for sizes in ([1, FEW_ROWS + 5], [FEW_ROWS, 6]):
        apart = [product(target, rows, weight, bias, **options) for rows in x.split(sizes)]
        assert torch.equal(torch.cat(apart), together)


@STORED
def test_a_recorded_step_multiplies_anew(stored):
    layer = QuantizedLinear(random_weight(stored, 200, 64, (64, 32)))
    x, graph = torch.randn(3, 64), CpuGraph()
    with graph.record():
        y = layer(x)
    x.copy_(torch.randn(3, 64))
    graph.replay()
    assert torch.equal(y, layer(x))


@STORED
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("num_rows", [1, 4, 7, ROWS_IN_REGISTERS, ROWS_IN_REGISTERS + 1, 2000])
def test_on_cpu_the_bits_are_those_of_the_dequantised_weight(stored, block, num_rows):
    weight = random_weight(stored, 100, 200, block)
    bias, x = torch.randn(100), torch.randn(num_rows, 200)
    dequantised = PackedLinear.pack(weight.dequantized(), bias)
    packed = PackedQuantizedLinear.pack(weight, bias)
    assert torch.equal(packed(x), dequantised(x))
    assert torch.equal(packed(x, relu_squared=True), dequantised(x, relu_squared=True))


def test_a_packed_weight_takes_a_byte_an_element():
    packed = PackedQuantizedLinear.pack(random_weight(FP8, 128, 256, (64, 128)), None)
    assert packed.panels.nbytes == 128 * 256


@triton_jit
def _widen_kernel(stored_ptr, widened_ptr):
    place = tl.arange(0, 256)
    tl.store(widened_ptr + place, widen_weight(tl.load(stored_ptr + place), tl.bfloat16))


@STORED
@pytest.mark.parametrize("by", ["instructions", "bits"])
def test_every_code_is_widened_exactly(stored, by):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    codes = torch.arange(256, dtype=torch.uint8).view(stored)
    known = ~codes.float().isnan()
    widened = torch.empty(256, dtype=torch.bfloat16, device=device)
    moved = codes if by == "instructions" else writable(codes)
    _widen_kernel[(1,)](moved.to(device), widened)
    assert torch.equal(widened.cpu().float()[known], codes.float()[known])


COMPILE = """
import itertools
import torch
from kernels.linear import quantized_linear
from kernels.moe import quantized_experts
from testing.kernels.sm_90 import compile_kernel

KERNELS = {
    quantized_linear: ("_quantized_linear_kernel", {"HAS_BIAS": False, "RELU_SQUARED": True}),
    quantized_experts: ("_quantized_experts_kernel", {"BLOCK_E": 128}),
}
for module, few_rows in itertools.product(KERNELS, (True, False, None)):
    if few_rows is None and module is quantized_experts:
        continue
    name, constants = KERNELS[module]
    types = {"*": "*bf16", "values_ptr": "*" + stored, "scales_ptr": "*fp32", "ends_ptr": "*i32"}
    tiles = dict(module.tile_request(torch.bfloat16, 4096, 4096, few_rows=few_rows).default)
    options = {name: tiles.pop(name) for name in ("num_warps", "num_stages")}
    constants = {**constants, "SCALES": scales, "PRECISION": "tf32", **tiles}
    compiled = compile_kernel(getattr(module, name), constants, types, **options)
    print("compiled", name, few_rows, stored, scales, compiled.registers)
    assert compiled.stack_bytes == 0, "registers spilled"
    assert compiled.shared_bytes < 228 * 1024
    assert "cp.async" in compiled.ptx
    assert stored != "fp8e4nv" or "cvt.rn.f16x2.e4m3x2" in compiled.ptx
"""


@pytest.mark.parametrize(
    ("stored", "scales"),
    [
        ("fp8e4nv", "step"),
        ("i8", "one"),
        pytest.param("fp8e4nv", "one", marks=pytest.mark.exhaustive),
        pytest.param("u8", "step", marks=pytest.mark.exhaustive),
    ],
)
def test_kernels_compile_for_sm_90_without_spills(stored, scales):
    assert output_of(COMPILE, stored=stored, scales=scales).count("compiled") == 5
