"""A linear layer, optionally with the activation of a feed-forward layer behind it.

On CPU in float32 its weight is packed for :mod:`kernels.packed_linear` and kept in that layout alone;
everywhere else it stays as loaded and torch multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.mixer_config import Activation
from engine.weights import WHOLE, Part, Weights
from kernels.packed_linear import PackedLinear
from kernels.relu_squared import relu_squared
from kernels.silu_gate import silu_gate


class Linear:
    """``scale * (x W^T + bias)``; ``scale`` is one number, or one an output.

    Where weights are packed it is folded into them; elsewhere it is applied to what comes out.
    """

    __slots__ = ("bias", "in_features", "out_features", "packed", "scale", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, scale: float | Tensor = 1.0) -> None:
        self.out_features, self.in_features = weight.shape
        packable = weight.device.type == "cpu" and weight.dtype == torch.float32
        self.scale: float | Tensor | None = None
        if not isinstance(scale, float) or scale != 1.0:
            if packable:
                weight, bias = _scaled(weight, scale), None if bias is None else bias * scale
            else:
                self.scale = scale
        self.packed = PackedLinear.pack(weight, bias) if packable else None
        self.weight = None if packable else weight
        self.bias = bias

    @classmethod
    def take(
        cls,
        weights: Weights,
        name: str,
        out_features: int,
        in_features: int,
        *,
        bias: bool = False,
        part: Part = WHOLE,
        scale: float | Tensor = 1.0,
    ) -> Linear:
        """Loads ``name.weight`` ``[out, in]`` and, where the layer has one, ``name.bias`` ``[out]``.

        Of a part of the inputs the bias must be added once among the ranks: pass ``bias`` on one of them.
        """
        weight = weights.take(f"{name}.weight", (out_features, in_features), part=part)
        if not bias:
            return cls(weight, scale=scale)
        return cls(
            weight,
            weights.take(f"{name}.bias", (out_features,), part=part if part.axis == 0 else WHOLE),
            scale=scale,
        )

    @classmethod
    def take_joined(
        cls,
        weights: Weights,
        layers: Sequence[tuple[str, int, Part]],
        in_features: int,
        *,
        bias: bool = False,
        scale: float | Tensor = 1.0,
    ) -> Linear:
        """Layers ``(name, out, part)`` of the same input as one, their outputs one behind the other."""
        joined = torch.cat(
            [weights.take(f"{name}.weight", (out, in_features), part=part) for name, out, part in layers]
        )
        if not bias:
            return cls(joined, scale=scale)
        biases = [weights.take(f"{name}.bias", (out,), part=part) for name, out, part in layers]
        return cls(joined, torch.cat(biases), scale=scale)

    def __call__(self, x: Tensor) -> Tensor:
        """``[n, in]`` to ``[n, out]``"""
        return self._multiply(x) if self.packed is None else self.packed(x)

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        """``[n, in]`` to ``[n, out]`` behind a squared ReLU; to ``[n, out / 2]`` of gates before ups."""
        return silu_gated(self(x)) if activation == "silu_gated" else self.relu_squared(x)

    def relu_squared(self, x: Tensor) -> Tensor:
        """``max(x W^T + bias, 0)^2`` (Primer, arXiv:2109.08668)"""
        if self.packed is not None:
            return self.packed(x, relu_squared=True)
        return relu_squared(self._multiply(x))

    def _multiply(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        y = F.linear(x, self.weight, self.bias)
        return y if self.scale is None else (y * self.scale).to(y.dtype)


def silu_gated(x: Tensor) -> Tensor:
    """Gates and ups ``[n, 2 I]`` to ``silu(gate) * up``, ``[n, I]``."""
    gate, up = x.chunk(2, dim=1)
    return silu_gate(up, gate)


def _scaled(weight: Tensor, scale: float | Tensor) -> Tensor:
    """Rows of ``[out, in]`` times a number, or each its own."""
    return weight * (scale[:, None] if isinstance(scale, Tensor) else scale)
