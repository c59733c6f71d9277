"""The experts of moe_route.py on CPU: a token's experts are found in one pass over its scores."""

from __future__ import annotations

import numpy as np
import torch

from kernels.cpu.exp import exp_f32
from kernels.cpu.jit import FlatArray, cpu_jit

_GRAIN_SCORES = 2**15  # about 100 µs
_ZERO, _ONE, _TINY = np.float32(0), np.float32(1), np.float32(1e-20)
_NEGATIVE_INFINITY = np.float32(-np.inf)


@cpu_jit
def _find_best(values, found):
    """Write the indices of the best values, best first; of equal ones, the lower index comes first."""
    for i in range(values.shape[0]):
        place = min(i, found.shape[0])
        while place > 0 and values[i] > values[found[place - 1]]:
            if place < found.shape[0]:
                found[place] = found[place - 1]
            place -= 1
        if place < found.shape[0]:
            found[place] = i


@cpu_jit
def _keep_groups(choice, sums, kept):
    """Set the choice to -inf outside the groups whose two best experts have the largest sums."""
    size = choice.shape[0] // sums.shape[0]
    for group in range(sums.shape[0]):
        best, second = _NEGATIVE_INFINITY, _NEGATIVE_INFINITY
        for i in range(group * size, (group + 1) * size):
            second = max(second, min(best, choice[i]))
            best = max(best, choice[i])
        sums[group] = best + second
    _find_best(sums, kept)
    for group in range(sums.shape[0]):
        if not np.any(kept == group):
            choice[group * size : (group + 1) * size] = _NEGATIVE_INFINITY


@cpu_jit
def _score(logits, correction, is_softmax, scores, choice):
    """Compute what experts are weighted with, and what they are chosen by: NaN becomes -inf, so that a token
    of a damaged state gets experts too."""
    shift, total = _ZERO, _ONE
    if is_softmax:
        shift, total = np.max(logits), _ZERO
        for i in range(logits.shape[0]):
            total += exp_f32(logits[i] - shift)
    for i in range(logits.shape[0]):
        if is_softmax:
            scores[i], choice[i] = exp_f32(logits[i] - shift) / total, logits[i]
        else:
            scores[i] = _ONE / (_ONE + exp_f32(-logits[i]))
            choice[i] = scores[i] + correction[i]
        if np.isnan(choice[i]):
            choice[i] = _NEGATIVE_INFINITY


@cpu_jit
def _route(logits, correction, shape, scaling, normalizes, is_softmax, ids, weights, begin, end):
    """Items are tokens. ``shape``: the numbers of experts, groups, a token's groups, and its routed and
    shared experts."""
    num_experts, num_groups, groups_per_token, k, num_shared = shape
    scores, choice = np.empty(num_experts, np.float32), np.empty(num_experts, np.float32)
    sums, kept = np.empty(num_groups, np.float32), np.empty(groups_per_token, np.int64)
    for token in range(begin, end):
        first = token * (k + num_shared)
        found, own = ids[first : first + k], weights[first : first + k]
        row = logits[token * num_experts : (token + 1) * num_experts]
        _score(row, correction, is_softmax, scores, choice)
        if groups_per_token < num_groups:
            _keep_groups(choice, sums, kept)
        _find_best(choice, found)
        total = _ZERO
        for j in range(k):
            own[j] = scores[found[j]]
            total += own[j]
        factor = scaling / (total + _TINY) if normalizes else scaling
        for j in range(k):
            own[j] *= factor
        for j in range(num_shared):
            ids[first + k + j], weights[first + k + j] = num_experts + j, _ONE


def moe_route_cpu(
    logits: torch.Tensor, correction: torch.Tensor | None, sizes: tuple[int, int, int, int], scaling: float,
    *, normalizes: bool, is_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute :func:`kernels.moe.moe_route.moe_route` for float32 logits.

    ``sizes``: the numbers of groups, and of a token's groups, routed and shared experts.
    """
    num_tokens, num_experts = logits.shape
    shape = num_tokens, sizes[2] + sizes[3]
    ids, weights = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
    logits = logits.contiguous()
    _route.parallel_for(
        num_tokens,
        1 + _GRAIN_SCORES // num_experts,
        FlatArray(logits),
        FlatArray(logits if correction is None else correction),  # not touched by softmax
        (num_experts, *sizes),
        np.float32(scaling),
        int(normalizes),
        int(is_softmax),
        FlatArray(ids),
        FlatArray(weights),
    )
    return ids, weights
