"""Products with the experts' weights of a few tokens, for GPUs: decode steps are full of them.

    up     y[t, j] = act(W_e x[t])          e = ids[t, j], for the j-th expert of token t
    down   y[t, j] = W_e x[t, j]

Nothing is sorted and no row is copied. A program finds the tokens of its expert in the table of ids, and its
tile has one row for every token of the step, of which those with other experts are empty. So every weight is
read once, which is what a step of few tokens waits for. The activation is applied before the product is
rounded.

Sums go through the inputs in steps of BLOCK_K, so a row's last bits depend on the tile, and the tile on the
number of tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.gpu.strides import adjacent
from kernels.gpu.tiles import TileRequest, choose
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.linear.invariant_linear import dot_precision, multiply_part

MOST_TOKENS = 128
"""Rows of the largest tile."""
TILE_ROWS = (16, 32, 64, MOST_TOKENS)
"""Rows of tiles; tensor cores multiply 16 at least."""


def few_token_up_reference(x: Tensor, weights: Tensor, expert_ids: Tensor, *, is_gated: bool) -> Tensor:
    """Map ``[n, in]`` and ids ``[n, k]`` to ``[n, k, out]``."""
    products = torch.einsum("njoi,ni->njo", weights[expert_ids], x)
    if is_gated:
        gate, up = products.chunk(2, dim=-1)
        return F.silu(gate) * up
    return products.clamp(min=0).square()


def few_token_down_reference(x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """Map ``[n, k, in]`` and ids ``[n, k]`` to ``[n, k, out]``."""
    return torch.einsum("njoi,nji->njo", weights[expert_ids], x)


# A program computes BLOCK_N outputs of one expert for all of its tokens. There is a program for every pair of
# token and expert, of which the one of an expert's first token works, or for every expert if those are fewer.
@triton_jit
def _few_tokens_kernel(
    x_ptr,
    weights_ptr,
    ids_ptr,
    y_ptr,
    num_tokens,
    num_outputs,
    num_inputs,
    x_stride,
    K: tl.constexpr,
    OF_PAIRS: tl.constexpr,
    RELU_SQUARED: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tokens, j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_J)
    is_pair = (tokens < num_tokens)[:, None] & (j < K)[None, :]
    ids = tl.load(ids_ptr + tokens[:, None] * K + j[None, :], mask=is_pair, other=-1)
    program, num_pairs = tl.program_id(0), num_tokens * K
    by_pair = tl.num_programs(0) == num_pairs
    expert = tl.where(by_pair, tl.load(ids_ptr + tl.minimum(program, num_pairs - 1)), program)
    first_token = tl.where(by_pair, program // K, num_tokens)
    is_own = ids == expert
    has_expert = tl.max(is_own.to(tl.int32), 1) > 0
    num_before = tl.sum((has_expert & (tokens < first_token)).to(tl.int32))
    if (num_before == 0) == by_pair:
        pairs = tokens * K + tl.sum(tl.where(is_own, j[None, :], 0), 1)
        x_ptrs = x_ptr + (pairs if OF_PAIRS else tokens).to(tl.int64) * x_stride
        outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        num_products = 2 * num_outputs if GATED else num_outputs
        weight_ptr = weights_ptr + expert * num_products * num_inputs
        total = multiply_part(
            x_ptrs, has_expert, weight_ptr, outputs, num_outputs, num_inputs, 0, num_inputs,
            BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip
        if GATED:
            up_ptr = weight_ptr + num_outputs.to(tl.int64) * num_inputs
            ups = multiply_part(
                x_ptrs, has_expert, up_ptr, outputs, num_outputs, num_inputs, 0, num_inputs,
                BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip
            total = total / (1.0 + tl.exp(-total)) * ups
        if RELU_SQUARED:
            total = tl.where(total < 0.0, 0.0, total)  # NaN is kept
            total *= total
        place_ptrs = y_ptr + pairs.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
        mask = has_expert[:, None] & (outputs < num_outputs)[None, :]
        tl.store(place_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask)


def num_rows_of(num_tokens: int) -> int:
    """Return the rows of the tile for so many tokens."""
    return next(rows for rows in TILE_ROWS if rows >= num_tokens)


def tile_request(dtype: torch.dtype, num_outputs: int, num_inputs: int, num_rows: int) -> TileRequest:
    """Request tiles of ``num_rows`` rows, which leave room for several programs per SM."""
    tiles = {"BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
    if num_rows >= 64:
        tiles |= {"BLOCK_N": num_rows, "BLOCK_K": 64, "num_warps": num_rows // 16, "num_stages": 3}
    if dtype == torch.float32:
        tiles |= {"BLOCK_N": 32, "BLOCK_K": 16, "num_stages": 2}
    return TileRequest.of(
        "experts", tiles, dtype=dtype, outputs=num_outputs, inputs=num_inputs, rows=num_rows
    )


def are_few_tokens(x: Tensor) -> bool:
    """Return whether this module multiplies so many tokens faster than a grouped GEMM."""
    return len(x) <= MOST_TOKENS and x.dtype in (torch.bfloat16, torch.float16)


def few_token_up(x: Tensor, weights: Tensor, expert_ids: Tensor, *, is_gated: bool) -> Tensor:
    """Map ``[n, in]``, rows at any stride, to the experts' activated channels ``[n, k, out]``.

    weights ``[experts, out, in]`` have x's dtype; ids ``[n, k]`` are int64, and those of a token distinct.
    With ``is_gated`` weights are ``[experts, 2 out, in]``, first the gates; otherwise the activation is
    ``max(x, 0)^2``. ``n`` is at most :data:`MOST_TOKENS`.
    """
    if x.is_cuda:
        return _launch(adjacent(x), weights, expert_ids, is_gated=is_gated, is_up=True)
    return few_token_up_reference(x, weights, expert_ids, is_gated=is_gated)


def few_token_down(x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """Map the channels of pairs ``[n, k, in]`` with weights ``[experts, out, in]`` to ``[n, k, out]``."""
    if x.is_cuda:
        return _launch(x.flatten(0, 1), weights, expert_ids, is_gated=False, is_up=False)
    return few_token_down_reference(x, weights, expert_ids)


def _launch(x: Tensor, weights: Tensor, expert_ids: Tensor, *, is_gated: bool, is_up: bool) -> Tensor:
    assert weights.is_contiguous()
    assert expert_ids.is_contiguous()
    num_tokens, k = expert_ids.shape
    assert num_tokens <= MOST_TOKENS
    num_experts, num_products, num_inputs = weights.shape
    num_outputs = num_products // 2 if is_gated else num_products
    y = x.new_empty(num_tokens, k, num_outputs)
    if num_tokens == 0:
        return y
    num_rows = num_rows_of(num_tokens)
    tiles = choose(tile_request(x.dtype, num_products, num_inputs, num_rows), x.device)
    num_programs = min(num_tokens * k, num_experts)
    _few_tokens_kernel[(num_programs, triton.cdiv(num_outputs, tiles["BLOCK_N"]))](
        x,
        weights,
        expert_ids,
        y,
        num_tokens,
        num_outputs,
        num_inputs,
        x.stride(0),
        K=k,
        OF_PAIRS=not is_up,
        RELU_SQUARED=is_up and not is_gated,
        GATED=is_gated,
        PRECISION=dot_precision(x.dtype),
        BLOCK_J=triton.next_power_of_2(k),
        BLOCK_M=num_rows,
        **tiles,
    )
    return y
