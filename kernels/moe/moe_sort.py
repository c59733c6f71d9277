"""Sort the (token, expert) pairs of a step by expert, as grouped GEMMs take them.

    tokens[place] = the token of the pair at this place
    places[t, j]  = the place of token t's j-th pair
    ends[e]       = number of places taken by experts 0 … e

The sort is stable: pairs of one expert are in the order of their tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.triton_jit import tl, triton_jit


def moe_sort_reference(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of :func:`moe_sort`, with torch's operators."""
    k, flat_ids = expert_ids.shape[1], expert_ids.flatten()
    order = flat_ids.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    experts = torch.arange(1, num_experts + 1, device=order.device)
    ends = torch.searchsorted(flat_ids[order], experts).to(torch.int32)
    return order // k, places.view_as(expert_ids), ends


_BLOCK = 1024
"""Fixed, because each size would be compiled when the first step needs it."""


# One program per expert, which needs nothing from other programs. It counts the pairs of experts with lower
# ids; this count is the first place of its expert. Then it gives each pair of its expert a place, in order.
# Every program reads all ids, from cache: a few KB in a decode step, 400 KB at 8,192 tokens with 6 experts
# each.
@triton_jit
def _sort_kernel(ids_ptr, tokens_ptr, places_ptr, ends_ptr, num_pairs, k, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    below = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        ids = tl.load(ids_ptr + first + i, mask=first + i < num_pairs, other=expert)
        below += (ids < expert).to(tl.int32)
    place = tl.sum(below)
    for first in range(0, num_pairs, BLOCK):
        pairs = first + i
        is_own = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1) == expert
        own = place + tl.cumsum(is_own.to(tl.int32)) - 1
        tl.store(tokens_ptr + own, (pairs // k).to(tl.int64), mask=is_own)
        tl.store(places_ptr + pairs, own.to(tl.int64), mask=is_own)
        place += tl.sum(is_own.to(tl.int32))
    tl.store(ends_ptr + expert, place)


def _launch(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    num_pairs = expert_ids.numel()
    tokens = torch.empty(num_pairs, dtype=torch.int64, device=expert_ids.device)
    places = torch.empty_like(expert_ids)
    ends = torch.empty(num_experts, dtype=torch.int32, device=expert_ids.device)
    _sort_kernel[(num_experts,)](
        expert_ids.contiguous(),
        tokens,
        places,
        ends,
        num_pairs,
        expert_ids.shape[1],
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return tokens, places, ends


def moe_sort(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens ``[n * k]`` int64, places ``[n, k]`` int64 and ends ``[num_experts]`` int32.

    expert_ids is ``[n, k]`` int64. Does not wait for the device.
    """
    if expert_ids.is_cuda:
        return _launch(expert_ids, num_experts)
    return moe_sort_reference(expert_ids, num_experts)
