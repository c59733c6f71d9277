"""Add up the outputs of a token's experts: ``out[t] = sum_j weights[t, j] * results[places[t, j]]``.

The results are stored in the order of the experts (moe_sort.py), or token by token (few_token_experts.py).
Sums are in float32, in the order of j, and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.moe.moe_combine_cpu import moe_combine_cpu


def moe_combine_reference(results: Tensor, places: Tensor | None, weights: Tensor) -> Tensor:
    """Reference of :func:`moe_combine`, with torch's operators."""
    acc = torch.promote_types(results.dtype, torch.float32)
    found = results.view(*weights.shape, -1) if places is None else results[places]
    return (found.to(acc) * weights[..., None]).sum(dim=1).to(results.dtype)


# One program per (token, BLOCK columns): it reads k rows once and writes one row.
@triton_jit
def _combine_kernel(
    results_ptr,
    places_ptr,
    weights_ptr,
    out_ptr,
    size,
    K: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < size
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        place = tl.load(places_ptr + token * K + j) if HAS_PLACES else token * K + j
        weight = tl.load(weights_ptr + token * K + j)
        total += weight * tl.load(results_ptr + place * size + columns, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * size + columns, total.to(out_ptr.dtype.element_ty), mask=live)


def _launch(results: Tensor, places: Tensor | None, weights: Tensor) -> Tensor:
    (num_tokens, k), size = weights.shape, results.shape[1]
    out = torch.empty((num_tokens, size), dtype=results.dtype, device=results.device)
    block = min(1024, triton.next_power_of_2(size))
    _combine_kernel[(num_tokens, triton.cdiv(size, block))](
        results.contiguous(),
        results if places is None else places,  # not touched without places
        weights.contiguous(),
        out,
        size,
        K=k,
        HAS_PLACES=places is not None,
        BLOCK=block,
        num_warps=4,
    )
    return out


def moe_combine(results: Tensor, places: Tensor | None, weights: Tensor) -> Tensor:
    """Return ``[n, size]``: the sums of the ``k`` results of each of ``n`` tokens.

    results ``[m, size]``, places ``[n, k]`` int64, weights ``[n, k]`` float32. Without places the results are
    those of the first token, in order, then of the second, and so on.
    """
    if results.is_cuda and results.dtype != torch.float64 and len(weights) > 0:
        return _launch(results, places, weights)
    on_cpu = results.device.type == "cpu" and results.dtype == weights.dtype == torch.float32
    if on_cpu and places is not None:
        return moe_combine_cpu(results, places, weights)
    return moe_combine_reference(results, places, weights)
