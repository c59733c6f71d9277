"""The feed-forward layer with squared ReLU (Primer, arXiv:2109.08668)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from engine.weights import WeightFiles


def relu_squared(x: Tensor) -> Tensor:
    """``max(x, 0)^2``, in place."""
    return x.relu_().square_()


class Mlp:
    """``down(relu(up(x))^2)``"""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, weights: WeightFiles, prefix: str
    ) -> None:
        self.up = weights.take(f"{prefix}up_proj.weight", (intermediate_size, hidden_size))
        self.down = weights.take(f"{prefix}down_proj.weight", (hidden_size, intermediate_size))
        self.up_bias = weights.take(f"{prefix}up_proj.bias", (intermediate_size,)) if bias else None
        self.down_bias = weights.take(f"{prefix}down_proj.bias", (hidden_size,)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """``[n, hidden]`` to ``[n, hidden]``"""
        return F.linear(relu_squared(F.linear(x, self.up, self.up_bias)), self.down, self.down_bias)
