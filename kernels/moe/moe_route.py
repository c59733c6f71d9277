"""The choice of a token's experts, and their weights.

    s     = sigmoid(logits) or softmax(logits)               float32
    ids   = the k best of s + correction, out of the best expert groups
    w     = scaling * s[ids] / sum(s[ids])                   divided only if normalized

Sigmoid routing is that of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2): the score of a group is the sum of
its two best experts; the correction affects the choice of experts but not their weights. Softmax routing has
neither groups nor correction; its normalized weights are the softmax over the k chosen logits. On CPU, numba
handles float32 (:mod:`kernels.moe.moe_route_cpu`) and the reference handles other dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.moe.moe_route_cpu import moe_route_cpu

Scoring = Literal["sigmoid", "softmax"]


@dataclass(frozen=True)
class Routing:
    """The rule by which a layer's router chooses experts."""

    experts_per_token: int
    expert_groups: int
    groups_per_token: int
    normalize_weights: bool
    scaling_factor: float
    scoring: Scoring = "sigmoid"
    shared_experts: int = 0
    """Experts that every token takes too, with a weight of 1. Their ids follow those of all others."""


def moe_route_reference(logits: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Reference of :func:`moe_route`: all tokens at once."""
    if routing.scoring == "softmax":
        scores, choice = logits.softmax(dim=-1), logits
    else:
        assert correction is not None
        scores = logits.sigmoid()
        choice = scores + correction
    if routing.groups_per_token < routing.expert_groups:
        choice = _mask_groups(choice, routing)
    expert_ids = choice.topk(routing.experts_per_token, dim=-1, sorted=False).indices
    weights = scores.gather(1, expert_ids)
    if routing.normalize_weights:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    weights = weights * routing.scaling_factor
    if routing.shared_experts == 0:
        return expert_ids, weights
    shared = logits.shape[1] + torch.arange(routing.shared_experts, device=logits.device)
    ones = weights.new_ones(len(weights), routing.shared_experts)
    return torch.cat([expert_ids, shared.expand_as(ones)], dim=1), torch.cat([weights, ones], dim=1)


def _mask_groups(choice: Tensor, routing: Routing) -> Tensor:
    """Set ``choice`` to -inf outside the best groups."""
    grouped = torch.unflatten(choice, 1, (routing.expert_groups, -1))
    group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
    best = group_scores.topk(routing.groups_per_token, dim=-1, sorted=False).indices
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).view_as(choice)


# One program per token, with its scores in registers as [groups, experts of a group]. The program takes one
# maximum after the other and removes each; if two are equal, it takes the lower index first. These are a few
# dozen reductions over a few hundred numbers, instead of a dozen launches.
@triton_jit
def _route_kernel(
    logits_ptr,
    correction_ptr,
    ids_ptr,
    weights_ptr,
    scaling,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUPS_PER_TOKEN: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    SHARED_EXPERTS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SOFTMAX: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    groups, inner = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E)
    experts = groups[:, None] * GROUP_SIZE + inner[None, :]
    live = (groups < GROUPS)[:, None] & (inner < GROUP_SIZE)[None, :]
    logits = tl.load(logits_ptr + token * (GROUPS * GROUP_SIZE) + experts, mask=live, other=0.0)
    if SOFTMAX:
        best_logit = tl.max(tl.max(tl.where(live, logits, float("-inf")), 1), 0)
        scores = tl.where(live, tl.exp(logits - best_logit), 0.0)
        scores /= tl.sum(tl.sum(scores, 1), 0)
        choice = logits  # not scores: the scores of far worse experts are all 0 and would not rank them
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        choice = scores + tl.load(correction_ptr + experts, mask=live, other=0.0)
    # NaN, from a damaged state, counts as the smallest value, so that the row still gets experts. The row's
    # weights are NaN anyway.
    choice = tl.where(live & (choice == choice), choice, float("-inf"))
    if GROUPS_PER_TOKEN < GROUPS:
        best = tl.max(choice, axis=1)
        first = tl.min(tl.where(choice == best[:, None], inner[None, :], BLOCK_E), axis=1)
        second = tl.max(tl.where(inner[None, :] == first[:, None], float("-inf"), choice), axis=1)
        group_scores = tl.where(groups < GROUPS, best + second, float("-inf"))
        kept = groups < 0
        for _ in tl.static_range(GROUPS_PER_TOKEN):
            left = tl.where(kept, float("-inf"), group_scores)
            rank = tl.where(kept | (groups >= GROUPS), BLOCK_G, groups)
            kept |= groups == tl.min(tl.where(left == tl.max(left), rank, BLOCK_G))
        choice = tl.where(kept[:, None], choice, float("-inf"))
    k = tl.arange(0, BLOCK_K)
    ids = tl.zeros((BLOCK_K,), tl.int32)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    taken = experts < 0
    for j in tl.static_range(EXPERTS_PER_TOKEN):
        rank = tl.where(taken | (live == 0), BLOCK_G * BLOCK_E, experts)
        left = tl.where(taken, float("-inf"), choice)
        expert = tl.min(tl.min(tl.where(left == tl.max(tl.max(left, 1), 0), rank, BLOCK_G * BLOCK_E), 1), 0)
        is_next = experts == expert
        taken |= is_next
        score = tl.sum(tl.sum(tl.where(is_next, scores, 0.0), 1), 0)
        ids = tl.where(k == j, expert, ids)
        weights = tl.where(k == j, score, weights)
    if NORMALIZE:
        weights = weights / (tl.sum(weights) + 1e-20)
    is_shared = k >= EXPERTS_PER_TOKEN
    ids = tl.where(is_shared, GROUPS * GROUP_SIZE + k - EXPERTS_PER_TOKEN, ids)
    weights = tl.where(is_shared, 1.0, weights * scaling)
    out = token * (EXPERTS_PER_TOKEN + SHARED_EXPERTS) + k
    mask = k < EXPERTS_PER_TOKEN + SHARED_EXPERTS
    tl.store(ids_ptr + out, ids.to(tl.int64), mask=mask)
    tl.store(weights_ptr + out, weights, mask=mask)


def _launch(logits: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    group_size = num_experts // routing.expert_groups
    per_token = routing.experts_per_token + routing.shared_experts
    shape = (num_tokens, per_token)
    expert_ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if num_tokens == 0:
        return expert_ids, weights
    _route_kernel[(num_tokens,)](
        logits.contiguous(),
        logits if correction is None else correction,  # not touched by softmax
        expert_ids,
        weights,
        routing.scaling_factor,
        GROUPS=routing.expert_groups,
        GROUP_SIZE=group_size,
        GROUPS_PER_TOKEN=routing.groups_per_token,
        EXPERTS_PER_TOKEN=routing.experts_per_token,
        SHARED_EXPERTS=routing.shared_experts,
        NORMALIZE=routing.normalize_weights,
        SOFTMAX=routing.scoring == "softmax",
        BLOCK_G=triton.next_power_of_2(routing.expert_groups),
        BLOCK_E=triton.next_power_of_2(group_size),
        BLOCK_K=triton.next_power_of_2(per_token),
        num_warps=1 if num_experts <= 256 else 4,
    )
    return expert_ids, weights


def moe_route(logits: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the ids of each token's experts and their weights, both ``[n, k]``, shared ones last.

    logits ``[n, experts]`` and correction ``[experts]`` are float32; softmax takes no correction. Ids are
    int64 and distinct, in no particular order; weights are float32.
    """
    if routing.scoring == "softmax":
        assert correction is None, "softmax routing has no correction"
        assert routing.expert_groups == 1, "softmax routing has no groups"
    if logits.is_cuda:
        return _launch(logits, correction, routing)
    if logits.dtype == torch.float32:
        sizes = (
            routing.expert_groups,
            routing.groups_per_token,
            routing.experts_per_token,
            routing.shared_experts,
        )
        is_softmax = routing.scoring == "softmax"
        return moe_route_cpu(
            logits, correction, sizes, routing.scaling_factor,
            normalizes=routing.normalize_weights, is_softmax=is_softmax,
        )  # fmt: skip
    return moe_route_reference(logits, correction, routing)
