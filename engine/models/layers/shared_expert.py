"""A shared expert as further experts that every token takes, for stacked experts.

Channels of an MLP don't know of each other until the output adds them up. So a shared expert that is m times
as wide as a routed one is m experts, each with a weight of 1. Their products are computed with those of all
others, and a step needs no launches for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.layers.linear import StoredWeights
from engine.models.layers.mlp import Mlp


@dataclass(frozen=True)
class SharedExperts:
    """Weights of the shape of routed experts' weights."""

    up: list[Tensor]
    down: list[Tensor]


def as_experts(shared: Mlp, up: StoredWeights, down: StoredWeights) -> SharedExperts | None:
    """Cut a shared expert into experts of the width of ``up`` and ``down``, those of the routed experts.

    Returns None if their widths don't match, or if they are scaled, quantised or have biases.
    """
    weights = shared.up_proj.weight, shared.down_proj.weight
    extras = (one for layer in (shared.up_proj, shared.down_proj) for one in (layer.bias, layer.scale))
    if any(one is not None for one in extras) or not all(isinstance(one, Tensor) for one in (up[0], down[0])):
        return None
    shared_up, shared_down = weights
    width = down[0].shape[1]
    if shared_up is None or shared_down is None or shared_down.shape[1] % width:
        return None
    num_experts = shared_down.shape[1] // width
    parts = shared_up.chunk(up[0].shape[0] // width)  # up, or gate and up
    cut = [part.chunk(num_experts) for part in parts]
    ups = [torch.cat(one) for one in zip(*cut, strict=True)]
    return SharedExperts(ups, list(shared_down.chunk(num_experts, dim=1)))
