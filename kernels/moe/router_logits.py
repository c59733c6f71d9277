"""The router's products of a few tokens on a GPU: ``logits[t, e] = sum over i of W[e, i] x[t, i]``.

They are in float32 whatever the hidden state's dtype. A library needs a copy of the hidden state in float32
first, and two launches for one token. For many tokens its GEMM is the faster one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.strides import adjacent
from kernels.gpu.triton_jit import tl, triton, triton_jit

MOST_TOKENS = 16
"""Each token's programs read all weights, from L2."""
_MOST_AT_ONCE = 4096
"""Inputs that a program loads before it adds up."""


def router_logits_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Map ``[n, in]`` and ``[experts, in]`` to ``[n, experts]``."""
    return x.to(weight.dtype) @ weight.T


# A program per expert and token, with the whole row of weights in flight.
@triton_jit
def _logits_kernel(x_ptr, weight_ptr, logits_ptr, num_experts, num_inputs, x_stride, BLOCK_K: tl.constexpr):
    expert, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    steps = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        k = start + steps
        w = tl.load(weight_ptr + expert * num_inputs + k, mask=k < num_inputs, other=0.0)
        x = tl.load(x_ptr + token * x_stride + k, mask=k < num_inputs, other=0.0)
        sums = tl.fma(w, x.to(tl.float32), sums)
    tl.store(logits_ptr + token * num_experts + expert, tl.sum(sums))


def _launch(x: Tensor, weight: Tensor) -> Tensor:
    assert weight.is_contiguous()
    (num_tokens, num_inputs), num_experts = x.shape, len(weight)
    logits = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=x.device)
    if num_tokens > 0:
        block_k = min(triton.next_power_of_2(num_inputs), _MOST_AT_ONCE)
        _logits_kernel[(num_experts, num_tokens)](
            x, weight, logits, num_experts, num_inputs, x.stride(0), BLOCK_K=block_k, num_warps=4
        )
    return logits


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Map ``[n, in]``, rows at any stride, with weights ``[experts, in]`` of float32 to ``[n, experts]``.

    Logits are float32. On a GPU, ``n`` should be at most :data:`MOST_TOKENS`.
    """
    return _launch(adjacent(x), weight) if x.is_cuda else router_logits_reference(x, weight)
