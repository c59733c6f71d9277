"""Grouped products with experts' weights of one byte, for GPUs. Consecutive rows of one expert are a run.

    y[r, o] = sum over k of x[r, k] W_e[o, k]        for rows ends[e - 1] <= r < ends[e]

Weights are as in :mod:`kernels.linear.quantized_linear`. Rows after the last end are not computed. The host
does not wait for the GPU, since only the GPU needs to know the ends of runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.formats.float8 import readable
from kernels.gpu.strides import adjacent
from kernels.gpu.tiles import TileRequest, choose
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.linear.quantized_linear import multiply_tile, scales_and_step
from kernels.linear.quantized_weight import QuantizedWeight
from kernels.moe.expert_linear import find_tile


@dataclass(frozen=True)
class QuantizedExperts:
    """Weights of one shape in one tensor, and their scales in another."""

    values: Tensor
    """``[experts, out, in]`` float8_e4m3fn or int8"""
    scales: Tensor
    """``[experts, ceil(out / block_rows), ceil(in / block_columns)]`` float32"""
    block_rows: int
    block_columns: int

    @classmethod
    def stack(cls, weights: Sequence[QuantizedWeight]) -> QuantizedExperts:
        """Stack weights of one dtype, in blocks whose size divides the block size of every weight."""
        num_outputs, num_inputs = weights[0].shape
        rows = math.gcd(*(one.block_rows for one in weights if one.scales.shape[0] > 1)) or num_outputs
        columns = math.gcd(*(one.block_columns for one in weights if one.scales.shape[1] > 1)) or num_inputs
        alike = [one.in_blocks(rows, columns) for one in weights]
        values, scales = [one.values for one in alike], [one.scales for one in alike]
        return cls(torch.stack(values), torch.stack(scales), rows, columns)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, expert: int) -> QuantizedWeight:
        return QuantizedWeight(self.values[expert], self.scales[expert], self.block_rows, self.block_columns)


def quantized_experts_reference(x: Tensor, experts: QuantizedExperts, ends: Tensor) -> Tensor:
    """Map ``[n, in]`` and ends ``[experts]`` to ``[n, out]``; rows after the last end are zero."""
    y = x.new_zeros(len(x), experts.values.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        y[start:end] = x[start:end] @ experts[expert].dequantized().to(x.dtype).T
        start = end
    return y


# --- Triton -------------------------------------------------------------------------------------------
# A program computes BLOCK_M rows of one expert times BLOCK_N outputs. There are as many programs as tiles in
# the worst distribution of the rows.


@triton_jit
def _quantized_experts_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    ends_ptr,
    y_ptr,
    num_experts,
    num_outputs,
    num_inputs,
    x_stride,
    scale_rows,
    scale_columns,
    block_rows,
    group,
    SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert, first, end = find_tile(ends_ptr, num_experts, BLOCK_E, BLOCK_M)
    if expert < num_experts:
        rows = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
        outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        row_mask = rows < end
        total = multiply_tile(
            x_ptr + rows * x_stride,
            row_mask,
            values_ptr + expert.to(tl.int64) * num_outputs * num_inputs,
            scales_ptr + expert * scale_rows * scale_columns,
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
        mask = row_mask[:, None] & (outputs < num_outputs)[None, :]
        place_ptrs = y_ptr + rows[:, None] * num_outputs + outputs[None, :]
        tl.store(place_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask)


def tile_request(dtype: torch.dtype, num_outputs: int, num_inputs: int, *, few_rows: bool) -> TileRequest:
    """Request tiles; ``few_rows`` means at most 16 rows per expert, on average."""
    if few_rows:
        default = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
    else:
        default = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
    if dtype == torch.float32:
        default |= {"BLOCK_K": 32, "num_stages": 2}
    rows = "few" if few_rows else "many"
    return TileRequest.of(
        "quantized_experts", default, dtype=dtype, outputs=num_outputs, inputs=num_inputs, rows=rows
    )


def quantized_experts(
    x: Tensor, experts: QuantizedExperts, ends: Tensor, *, batch_invariant: bool = False
) -> Tensor:
    """Map ``[n, in]``, rows at any stride, and ends ``[experts]`` int32 to ``[n, out]`` in x's dtype.

    With ``batch_invariant`` a row has the same bits among any number of rows.
    """
    x = adjacent(x)
    num_rows, num_inputs = x.shape
    num_experts, num_outputs, _ = experts.values.shape
    y = x.new_empty(num_rows, num_outputs)
    if num_rows == 0:
        return y
    few_rows = not batch_invariant and num_rows <= 16 * num_experts
    tiles = choose(tile_request(x.dtype, num_outputs, num_inputs, few_rows=few_rows), x.device)
    scales, step = scales_and_step(experts.block_columns, experts.scales.shape[2], tiles["BLOCK_K"])
    most_tiles = min(num_rows, num_rows // tiles["BLOCK_M"] + num_experts)
    grid = (most_tiles, triton.cdiv(num_outputs, tiles["BLOCK_N"]))
    _quantized_experts_kernel[grid](
        x,
        readable(experts.values),
        experts.scales,
        ends,
        y,
        num_experts,
        num_outputs,
        num_inputs,
        x.stride(0),
        experts.scales.shape[1],
        experts.scales.shape[2],
        experts.block_rows,
        experts.block_columns,
        SCALES=scales,
        PRECISION="tf32" if x.dtype != torch.float32 and scales != "each" else "tf32x3",
        BLOCK_E=triton.next_power_of_2(num_experts),
        **(tiles | {"BLOCK_K": step}),
    )
    return y
