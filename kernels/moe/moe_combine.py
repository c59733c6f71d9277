"""Add up the outputs of a token's experts: ``out[t] = sum_j weights[t, j] * results[places[t, j]]``.

The results are stored in the order of the experts (moe_sort.py). Sums are in float32, in the order of j, and
rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.moe.moe_combine_cpu import moe_combine_cpu


def moe_combine_reference(results: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Reference of :func:`moe_combine`, with torch's operators."""
    acc = torch.promote_types(results.dtype, torch.float32)
    return (results[places].to(acc) * weights[..., None]).sum(dim=1).to(results.dtype)


# One program per (token, BLOCK columns): it reads k rows once and writes one row.
@triton_jit
def _combine_kernel(
    results_ptr, places_ptr, weights_ptr, out_ptr, size, K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < size
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        place = tl.load(places_ptr + token * K + j)
        weight = tl.load(weights_ptr + token * K + j)
        total += weight * tl.load(results_ptr + place * size + columns, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * size + columns, total.to(out_ptr.dtype.element_ty), mask=live)


def _launch(results: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    (num_tokens, k), size = places.shape, results.shape[1]
    out = torch.empty((num_tokens, size), dtype=results.dtype, device=results.device)
    block = min(1024, triton.next_power_of_2(size))
    _combine_kernel[(num_tokens, triton.cdiv(size, block))](
        results.contiguous(), places, weights.contiguous(), out, size, K=k, BLOCK=block, num_warps=4
    )
    return out


def moe_combine(results: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Return ``[n, size]``: the sums of the ``k`` results of each of ``n`` tokens.

    results ``[m, size]``, places ``[n, k]`` int64, weights ``[n, k]`` float32.
    """
    if results.is_cuda and results.dtype != torch.float64 and len(places) > 0:
        return _launch(results, places, weights)
    if results.device.type == "cpu" and results.dtype == weights.dtype == torch.float32:
        return moe_combine_cpu(results, places, weights)
    return moe_combine_reference(results, places, weights)
