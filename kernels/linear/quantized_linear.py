"""Linear layers with weights of one byte, for inputs in bfloat16 or float32 (W8A16, W8A32).

    y[r, o] = act(bias[o] + sum over groups g of s[o, g] * (sum over k in g of x[r, k] w[o, k]))

w is float8_e4m3fn or int8, s its scale (:mod:`kernels.linear.quantized_weight`), act the identity or
max(y, 0)^2. Inputs are not quantised: both kinds of w are exact in bfloat16; products and sums are float32.

| device | x | computed by |
|---|---|---|
| GPU | bfloat16, float32 | the Triton kernel below |
| CPU | float32 | :mod:`kernels.linear.quantized_linear_cpu` |
| CPU | bfloat16 | the same module, in float32, rounded once at the end |
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.formats.float8 import readable
from kernels.gpu.strides import adjacent
from kernels.gpu.tiles import TileRequest, choose
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.linear.quantized_linear_cpu import PackedQuantizedLinear
from kernels.linear.quantized_weight import QuantizedWeight

FEW_ROWS = 64
"""Up to this number of rows, a call uses the tiles for decode rows, with which weights are read from memory
once. For more rows it uses larger tiles."""


def quantized_linear_reference(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, *, relu_squared: bool = False
) -> Tensor:
    """Map ``[n, in]`` to ``[n, out]`` in x's dtype, with the weight dequantised to that dtype."""
    y = torch.nn.functional.linear(x, weight.dequantized().to(x.dtype), bias)
    return y.relu().square() if relu_squared else y


# --- Triton -------------------------------------------------------------------------------------------
# A program computes BLOCK_M rows times BLOCK_N outputs and goes through the inputs in steps of BLOCK_K. Bytes
# are widened in registers without loss, and scaled in float32: the sum, each step's product, or each weight,
# whichever SCALES says.
# If a GPU has no instructions for FP8, the bits are passed as uint8 and moved into a float16: the low 7 bits,
# shifted left by 7, are a 256th of the value, also for subnormals.


@triton_jit
def widen_weight(stored, dtype: tl.constexpr):
    """Convert float8_e4m3fn, its bits as uint8, or int8 to ``dtype``, exactly."""
    if stored.dtype == tl.int8:
        return stored.to(tl.float32).to(dtype)
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.int16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return (half * 256.0).to(dtype)
    return stored.to(tl.float16).to(dtype)


@triton_jit
def multiply_tile(
    x_ptrs,
    row_mask,
    values_ptr,
    scales_ptr,
    outputs,
    num_outputs,
    num_inputs,
    scale_columns,
    block_rows,
    group,
    SCALES: tl.constexpr,  # "one" for each row of the weight, for each "step" of BLOCK_K, or for "each" input
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return a product ``[BLOCK_M, BLOCK_N]`` in float32; ``x_ptrs`` point to the rows' first elements."""
    inputs = tl.arange(0, BLOCK_K)
    output_mask = outputs < num_outputs
    value_ptrs = values_ptr + outputs.to(tl.int64)[:, None] * num_inputs
    scale_ptrs = scales_ptr + (outputs // block_rows) * scale_columns
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, num_inputs, BLOCK_K):
        k = first + inputs
        x = tl.load(
            x_ptrs[:, None] + k[None, :], mask=row_mask[:, None] & (k < num_inputs)[None, :], other=0.0
        )
        mask = output_mask[:, None] & (k < num_inputs)[None, :]
        stored = tl.load(value_ptrs + k[None, :], mask=mask, other=0.0)
        if SCALES == "one":
            w = widen_weight(stored, x.dtype)
            total = tl.dot(x, tl.trans(w), total, input_precision=PRECISION)
        elif SCALES == "step":
            w = widen_weight(stored, x.dtype)
            scale = tl.load(scale_ptrs + first // group, mask=output_mask, other=0.0)
            total += tl.dot(x, tl.trans(w), input_precision=PRECISION) * scale[None, :]
        else:
            scale = tl.load(scale_ptrs[:, None] + (k // group)[None, :], mask=mask, other=0.0)
            w = widen_weight(stored, tl.float32) * scale
            total = tl.dot(x.to(tl.float32), tl.trans(w), total, input_precision=PRECISION)
    if SCALES == "one":
        total *= tl.load(scale_ptrs, mask=output_mask, other=0.0)[None, :]
    return total


@triton_jit
def _quantized_linear_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    scale_columns,
    block_rows,
    group,
    SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU_SQUARED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Programs with the same outputs are neighbours: all of them except the first find the weight in L2.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < num_rows
    total = multiply_tile(
        x_ptr + rows * x_stride,
        row_mask,
        values_ptr,
        scales_ptr,
        outputs,
        num_outputs,
        num_inputs,
        scale_columns,
        block_rows,
        group,
        SCALES,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        PRECISION,
    )
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)[None, :]
    if RELU_SQUARED:
        total = tl.where(total < 0.0, 0.0, total)  # NaN is not below zero and stays
        total *= total
    place = y_ptr + rows[:, None] * num_outputs + outputs[None, :]
    mask = row_mask[:, None] & (outputs < num_outputs)[None, :]
    tl.store(place, total.to(y_ptr.dtype.element_ty), mask=mask)


def tile_request(
    dtype: torch.dtype, num_outputs: int, num_inputs: int, *, few_rows: bool | None
) -> TileRequest:
    """Request tiles for few rows, for many, or (None) one tile for any number of rows.

    A row's sums may differ by rounding between these cases, but not within one of them.
    """
    if few_rows is None:
        default = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
    elif few_rows:
        default = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
    else:
        default = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
    if dtype == torch.float32:
        default |= {"BLOCK_M": min(64, default["BLOCK_M"]), "BLOCK_K": 32, "num_stages": 2}
    rows = {None: "any", True: "few", False: "many"}[few_rows]
    return TileRequest.of(
        "quantized_linear", default, dtype=dtype, outputs=num_outputs, inputs=num_inputs, rows=rows
    )


def scales_and_step(group: int, num_groups: int, step: int) -> tuple[str, int]:
    """Return a kernel's SCALES and BLOCK_K if ``group`` inputs share a scale.

    The inputs of a step share one scale, except with SCALES "each", where a step looks up each input's scale.
    """
    if num_groups == 1:
        return "one", step
    fits = group & -group  # the largest power of two that divides group
    return ("step", min(step, fits)) if fits >= 16 else ("each", 32)


def quantized_linear_triton(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    *,
    relu_squared: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """Map ``[n, in]``, rows at any stride, to ``[n, out]`` in x's dtype.

    With ``batch_invariant`` a row has the same bits among any number of rows.
    """
    x = adjacent(x)
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[0]
    y = x.new_empty(num_rows, num_outputs)
    if num_rows == 0:
        return y
    few_rows = None if batch_invariant else num_rows <= FEW_ROWS
    tiles = choose(tile_request(x.dtype, num_outputs, num_inputs, few_rows=few_rows), x.device)
    scales, step = scales_and_step(weight.block_columns, weight.scales.shape[1], tiles["BLOCK_K"])
    grid = (triton.cdiv(num_rows, tiles["BLOCK_M"]), triton.cdiv(num_outputs, tiles["BLOCK_N"]))
    _quantized_linear_kernel[grid](
        x,
        readable(weight.values),
        weight.scales,
        weight.scales if bias is None else bias,
        y,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        weight.scales.shape[1],
        weight.block_rows,
        weight.block_columns,
        SCALES=scales,
        HAS_BIAS=bias is not None,
        RELU_SQUARED=relu_squared,
        PRECISION="tf32" if x.dtype != torch.float32 and scales != "each" else "tf32x3",
        **(tiles | {"BLOCK_K": step}),
    )
    return y


class QuantizedLinear:
    """A weight of bytes in its device's form: packed on CPU, unchanged on other devices."""

    __slots__ = ("batch_invariant", "bias", "num_outputs", "packed", "weight")

    def __init__(
        self, weight: QuantizedWeight, bias: Tensor | None = None, *, batch_invariant: bool = False
    ) -> None:
        self.num_outputs = weight.shape[0]
        self.batch_invariant = batch_invariant
        on_cpu = weight.device.type == "cpu"
        self.packed = PackedQuantizedLinear.pack(weight, bias) if on_cpu else None
        self.weight = None if on_cpu else weight
        self.bias = None if on_cpu else bias

    def __call__(self, x: Tensor, *, relu_squared: bool = False) -> Tensor:
        """Map ``[n, in]`` to ``[n, out]`` in x's dtype."""
        if self.packed is None:
            assert self.weight is not None
            return quantized_linear_triton(
                x,
                self.weight,
                self.bias,
                relu_squared=relu_squared,
                batch_invariant=self.batch_invariant,
            )
        if x.dtype == torch.float32:
            return self.packed(x, relu_squared=relu_squared)
        return self.packed(x.to(torch.float32), relu_squared=relu_squared).to(x.dtype)
