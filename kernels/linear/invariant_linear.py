"""Linear layers on a GPU whose rows have the same bits in every batch, without packed or quantised weights.

    y[r, o] = bias[o] + p_0[r, o] + p_1[r, o] + …            p_i = sum over k in part i of x[r, k] W[o, k]

A library chooses tiles and splits by the number of rows, so a row's last digits change with its neighbours.
Here the weight's shape and dtype alone determine the tile, the parts that the inputs are cut into, and the
order of each sum: within a part in steps of BLOCK_K, then the parts in order, in float32, rounded once.

x and W are bfloat16, float16 or float32 (IEEE products). On a CPU, :mod:`kernels.linear.packed_linear` keeps
this promise; this module's reference does not.

What that costs beside cuBLAS, counted and not measured, for an 8 B model in bfloat16 on 132 SMs:

* Few rows: the weight is read once, as by cuBLAS. A tile always has 64 rows, so one row computes 64: 1 TFLOP
  for 16 GB of weights, which take as long to read as 5 TFLOP to compute. Outputs of up to 16,384 columns take
  a second launch and a scratch of ``4 * parts`` bytes per output: 0.13 MB for one row and 4096 outputs.
* Many rows: one launch. Tiles of 64 x 128 read 1.5 times as many operands from L2 as those of 128 x 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.strides import adjacent
from kernels.gpu.tiles import TileRequest, choose
from kernels.gpu.triton_jit import tl, triton, triton_jit

MANY_TILES = 128
"""From this number of tiles on, one program computes all parts of a tile: the tiles alone fill a GPU."""
_FILLED = 256
"""Programs that fill a GPU while they read a weight: two for each SM."""
_ADDED_OUTPUTS = 512
_LEAST_INPUTS = 512
"""Inputs of the smallest part. A smaller part would hardly start its loads before it ends."""


def invariant_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map ``[n, in]`` to ``[n, out]``."""
    return torch.nn.functional.linear(x, weight, bias)


# --- Triton -------------------------------------------------------------------------------------------
# A program computes BLOCK_M rows times BLOCK_N outputs. With few tiles it computes one part of the inputs, so
# that the programs of all parts together fill the GPU, and a second launch adds up what they left. With many
# tiles a program goes through the parts itself. Both ways add the same numbers in the same order.


@triton_jit
def multiply_part(
    x_ptrs,
    row_mask,
    weight_ptr,
    outputs,
    num_outputs,
    num_inputs,
    first,
    last,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the product ``[BLOCK_M, BLOCK_N]`` of inputs ``first : last``, in float32; ``x_ptrs`` are the
    rows' first elements."""
    steps = tl.arange(0, BLOCK_K)
    output_mask = outputs < num_outputs
    weight_ptrs = weight_ptr + outputs.to(tl.int64)[:, None] * num_inputs
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_K):
        k = start + steps
        live = (k < last)[None, :]
        x = tl.load(x_ptrs[:, None] + k[None, :], mask=row_mask[:, None] & live, other=0.0)
        w = tl.load(weight_ptrs + k[None, :], mask=output_mask[:, None] & live, other=0.0)
        total = tl.dot(x, tl.trans(w), total, input_precision=PRECISION)
    return total


@triton_jit
def _invariant_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    parts_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    part_inputs,
    num_parts,
    HAS_BIAS: tl.constexpr,
    IS_PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Programs with the same outputs are neighbours: all of them except the first find the weight in L2.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < num_rows
    mask = row_mask[:, None] & (outputs < num_outputs)[None, :]
    place = rows[:, None] * num_outputs + outputs[None, :]
    x_ptrs = x_ptr + rows * x_stride
    if IS_PART:
        part = tl.program_id(2).to(tl.int64)
        first = tl.program_id(2) * part_inputs
        product = multiply_part(
            x_ptrs, row_mask, weight_ptr, outputs, num_outputs, num_inputs, first,
            tl.minimum(first + part_inputs, num_inputs), BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip
        tl.store(parts_ptr + part * num_rows * num_outputs + place, product, mask=mask)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in range(num_parts):
            first = i * part_inputs
            total += multiply_part(
                x_ptrs, row_mask, weight_ptr, outputs, num_outputs, num_inputs, first,
                tl.minimum(first + part_inputs, num_inputs), BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip
        if HAS_BIAS:
            bias = tl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0)
            total += bias.to(tl.float32)[None, :]
        tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=mask)


# One program per (row, BLOCK outputs): it adds up the parts in order.
@triton_jit
def _add_parts_kernel(
    parts_ptr, bias_ptr, y_ptr, num_rows, num_outputs, num_parts, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = outputs < num_outputs
    place = row * num_outputs + outputs
    total = tl.zeros((BLOCK,), tl.float32)
    part_size = tl.cast(num_rows, tl.int64) * num_outputs
    for _ in range(num_parts):
        total += tl.load(parts_ptr + place, mask=live, other=0.0)
        parts_ptr += part_size
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=live)


def tile_request(dtype: torch.dtype, num_outputs: int, num_inputs: int) -> TileRequest:
    """Request tiles and the number of parts: as many as fill the GPU with programs that read the weight."""
    tiles = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
    if dtype == torch.float32:
        tiles |= {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 16, "num_stages": 2}
    columns = -(-num_outputs // tiles["BLOCK_N"])
    most = max(1, min(_FILLED // columns, num_inputs // _LEAST_INPUTS))
    tiles["PARTS"] = 1 << (most.bit_length() - 1)
    return TileRequest.of("invariant_linear", tiles, dtype=dtype, outputs=num_outputs, inputs=num_inputs)


def dot_precision(dtype: torch.dtype) -> str:
    """Return the mode of products: IEEE for float32, since TF32 would cut it to 10 mantissa bits."""
    return "ieee" if dtype == torch.float32 else "tf32"


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    num_outputs, num_inputs = weight.shape
    tiles = dict(choose(tile_request(x.dtype, num_outputs, num_inputs), x.device))
    num_parts, block_k = tiles.pop("PARTS"), tiles["BLOCK_K"]
    assert weight.is_contiguous()
    x, num_rows = adjacent(x), len(x)
    y = x.new_empty(num_rows, num_outputs)
    if num_rows == 0:
        return y
    grid = triton.cdiv(num_rows, tiles["BLOCK_M"]), triton.cdiv(num_outputs, tiles["BLOCK_N"])
    is_part = num_parts > 1 and grid[0] * grid[1] < MANY_TILES
    parts = y
    if is_part:
        parts = torch.empty((num_parts, num_rows, num_outputs), dtype=torch.float32, device=x.device)
    added = y if bias is None else bias  # not touched without a bias
    _invariant_linear_kernel[(*grid, num_parts if is_part else 1)](
        x,
        weight,
        added,
        y,
        parts,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        triton.cdiv(triton.cdiv(num_inputs, num_parts), block_k) * block_k,
        num_parts,
        HAS_BIAS=bias is not None,
        IS_PART=is_part,
        PRECISION=dot_precision(x.dtype),
        **tiles,
    )
    if is_part:
        _add_parts_kernel[(num_rows, triton.cdiv(num_outputs, _ADDED_OUTPUTS))](
            *(parts, added, y, num_rows, num_outputs, num_parts),
            HAS_BIAS=bias is not None,
            BLOCK=_ADDED_OUTPUTS,
            num_warps=4,
        )
    return y


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map ``[n, in]``, rows at any stride, with weight ``[out, in]`` and bias ``[out]`` to ``[n, out]``.

    All have one dtype. On a GPU a row's result is the same, bit for bit, alone and among any other rows.
    """
    if x.is_cuda and x.dtype != torch.float64:
        return _launch(x, weight, bias)
    return invariant_linear_reference(x, weight, bias)
