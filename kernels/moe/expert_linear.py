"""Grouped products with experts' weights, for GPUs. Consecutive rows of one expert are a run.

    y[r, o] = sum over k of x[r, k] W_e[o, k]        for rows ends[e - 1] <= r < ends[e]

Rows after the last end are not computed. The host does not have to read anything: only the GPU knows the ends
of runs. The weights' shape and dtype alone determine the tile, so a row has the same bits in every batch.
torch's ``grouped_mm`` chooses its tile by the number of rows; it has no kernel for float32, whose ends it
reads on the host, nor for bfloat16 on other GPUs than those of compute capability 9 and 10.

Beside ``grouped_mm``, counted and not measured: as many launches, and the same bytes. A tile always has 64
rows. In a step of 64 tokens with 6 of 128 experts each, an expert has 3 rows on average, and its tiles
compute 64. For Nemotron 3 Nano these are 0.16 TFLOP a layer; its 2.6 GB of weights take as long to read as
0.75 TFLOP to compute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.strides import adjacent
from kernels.gpu.tiles import TileRequest, choose
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.linear.invariant_linear import dot_precision, multiply_part


def expert_linear_reference(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Map ``[n, in]`` and ends ``[experts]`` to ``[n, out]``; rows after the last end are zero."""
    y = x.new_zeros(len(x), weights.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        y[start:end] = x[start:end] @ weights[expert].T
        start = end
    return y


@triton_jit
def find_tile(ends_ptr, num_experts, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert of tile ``program_id(0)``, its first row, and the end of the expert's rows.

    An expert's tiles follow those of the experts before it. After the last tile the expert is
    ``num_experts``.
    """
    experts = tl.arange(0, BLOCK_E)
    is_expert = experts < num_experts
    ends = tl.load(ends_ptr + experts, mask=is_expert, other=0)
    starts = tl.load(ends_ptr + experts - 1, mask=is_expert & (experts > 0), other=0)
    tiles = tl.where(is_expert, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
    tiles_up_to = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    expert = tl.sum(tl.where(is_expert & (tiles_up_to <= tile), 1, 0))
    is_own = experts == expert
    start, end = tl.sum(tl.where(is_own, starts, 0)), tl.sum(tl.where(is_own, ends, 0))
    place = tile - tl.sum(tl.where(is_own, tiles_up_to - tiles, 0))
    return expert, start + place * BLOCK_M, end


# A program computes BLOCK_M rows of one expert times BLOCK_N outputs, over all inputs. There are as many
# programs as tiles in the worst distribution of the rows.
@triton_jit
def _expert_linear_kernel(
    x_ptr,
    weights_ptr,
    ends_ptr,
    y_ptr,
    num_experts,
    num_outputs,
    num_inputs,
    x_stride,
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
        weight_ptr = weights_ptr + expert.to(tl.int64) * num_outputs * num_inputs
        total = multiply_part(
            x_ptr + rows * x_stride, row_mask, weight_ptr, outputs, num_outputs, num_inputs, 0, num_inputs,
            BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip
        mask = row_mask[:, None] & (outputs < num_outputs)[None, :]
        place_ptrs = y_ptr + rows[:, None] * num_outputs + outputs[None, :]
        tl.store(place_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask)


def tile_request(dtype: torch.dtype, num_outputs: int, num_inputs: int) -> TileRequest:
    """Request tiles that leave room for two programs per SM."""
    tiles = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
    if dtype == torch.float32:
        tiles |= {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 16, "num_stages": 2}
    return TileRequest.of("expert_linear", tiles, dtype=dtype, outputs=num_outputs, inputs=num_inputs)


def _launch(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    assert weights.is_contiguous()
    x = adjacent(x)
    num_rows, num_inputs = x.shape
    num_experts, num_outputs, _ = weights.shape
    y = x.new_empty(num_rows, num_outputs)
    if num_rows == 0:
        return y
    tiles = choose(tile_request(x.dtype, num_outputs, num_inputs), x.device)
    most_tiles = min(num_rows, num_rows // tiles["BLOCK_M"] + num_experts)
    _expert_linear_kernel[(most_tiles, triton.cdiv(num_outputs, tiles["BLOCK_N"]))](
        x,
        weights,
        ends,
        y,
        num_experts,
        num_outputs,
        num_inputs,
        x.stride(0),
        PRECISION=dot_precision(x.dtype),
        BLOCK_E=triton.next_power_of_2(num_experts),
        **tiles,
    )
    return y


def expert_linear(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Map ``[n, in]``, rows at any stride, with weights ``[experts, out, in]`` to ``[n, out]``.

    x and weights have one dtype; ends ``[experts]`` is int32. Rows after the last end are undefined.
    """
    if x.is_cuda and x.dtype != torch.float64:
        return _launch(x, weights, ends)
    return expert_linear_reference(x, weights, ends)
