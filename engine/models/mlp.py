"""The feed-forward layer with squared ReLU (Primer, arXiv:2109.08668)."""

from __future__ import annotations

from torch import Tensor

from engine.models.linear import Linear
from engine.weights import WeightFiles


def relu_squared(x: Tensor) -> Tensor:
    """``max(x, 0)^2``, in place."""
    return x.relu_().square_()


class Mlp:
    """``down(relu(up(x))^2)``"""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, weights: WeightFiles, prefix: str
    ) -> None:
        self.up_proj = Linear.take(weights, f"{prefix}up_proj", intermediate_size, hidden_size, bias=bias)
        self.down_proj = Linear.take(weights, f"{prefix}down_proj", hidden_size, intermediate_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, hidden]`` to ``[n, hidden]``"""
        return self.down_proj(relu_squared(self.up_proj(x)))
