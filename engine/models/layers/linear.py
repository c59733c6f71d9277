"""A linear layer, optionally followed by the activation of a feed-forward layer.

On CPU in float32 the weight is packed for :mod:`kernels.linear.packed_linear` and kept only in that layout,
in a dtype of :mod:`engine.checkpoint.weight_dtype`. Otherwise the weight stays as it was loaded, and torch
multiplies. A quantised weight stays quantised on all devices (:mod:`kernels.linear.quantized_linear`).

If a row must have the same bits in every batch, torch does not multiply: on a GPU
:mod:`kernels.linear.invariant_linear` does, and on a CPU the weight is packed for every dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoint.mixer_config import Activation
from engine.checkpoint.weight_dtype import WeightDtype, narrowed
from engine.checkpoint.weights import WHOLE, Part, Weights
from kernels.linear.invariant_linear import invariant_linear
from kernels.linear.packed_linear import PackedLinear
from kernels.linear.quantized_linear import QuantizedLinear
from kernels.linear.quantized_weight import QuantizedWeight, join
from kernels.norms.relu_squared import relu_squared
from kernels.norms.silu_gate import silu_gate

logger = logging.getLogger(__name__)

StoredWeights = Sequence[Tensor | QuantizedWeight]
"""Weights of shape ``[out, in]`` each."""


class Linear:
    """``scale * (x W^T + bias)``; ``scale`` is one number, or one number per output.

    The scale is folded into packed weights, or into the scales of quantised weights. Otherwise it is applied
    to the output.
    """

    __slots__ = ("bias", "in_features", "out_features", "packed", "product", "scale", "weight")

    def __init__(
        self,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None = None,
        *,
        scale: float | Tensor = 1.0,
        batch_invariant: bool = False,
        weight_dtype: WeightDtype = "float32",
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.packed: PackedLinear | QuantizedLinear | None = None
        self.product = invariant_linear if batch_invariant else F.linear
        self.weight: Tensor | None = None
        self.bias = bias
        self.scale = None if isinstance(scale, float) and scale == 1.0 else scale
        if isinstance(weight, Tensor):
            is_packed = batch_invariant or weight.dtype == torch.float32
            if weight.device.type != "cpu" or not is_packed:
                self.weight = weight
                return
            if weight.dtype != torch.float32:
                weight, weight_dtype = weight.float(), "auto"
        if self.scale is not None:
            weight, bias = _scaled(weight, self.scale), None if bias is None else bias * self.scale
        if isinstance(weight, Tensor):
            self.packed = PackedLinear.pack(narrowed(weight, weight_dtype), bias)
        else:
            self.packed = QuantizedLinear(weight, bias, batch_invariant=batch_invariant)

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
        """Load ``name.weight`` ``[out, in]`` and, with ``bias``, ``name.bias`` ``[out]``.

        If ranks divide the inputs, only one rank may add the bias: pass ``bias`` on one rank.
        """
        weight = weights.take_weight(name, (out_features, in_features), part=part)
        if not bias:
            return cls._kept(weights, weight, None, scale)
        offset = weights.take(f"{name}.bias", (out_features,), part=part if part.axis == 0 else WHOLE)
        return cls._kept(weights, weight, offset, scale)

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
        """Join layers ``(name, out, part)`` that have the same inputs into one layer.

        Its output is their outputs, concatenated.
        """
        taken = [weights.take_weight(name, (out, in_features), part=part) for name, out, part in layers]
        weight = joined(taken, weights.dtype)
        if not bias:
            return cls._kept(weights, weight, None, scale)
        biases = [weights.take(f"{name}.bias", (out,), part=part) for name, out, part in layers]
        return cls._kept(weights, weight, torch.cat(biases), scale)

    @classmethod
    def _kept(
        cls,
        weights: Weights,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        scale: float | Tensor,
    ) -> Linear:
        """Make a layer that computes and keeps its weight as ``weights`` says."""
        return cls(
            weight,
            bias,
            scale=scale,
            batch_invariant=weights.batch_invariant,
            weight_dtype=weights.weight_dtype,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Map ``[n, in]`` to ``[n, out]``."""
        return self._multiply(x) if self.packed is None else self.packed(x)

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        """Multiply and activate ``[n, in]``: to ``[n, out]`` by squared ReLU, to ``[n, out / 2]`` by SwiGLU.

        With SwiGLU the layer's outputs are the gates, followed by the values that they multiply.
        """
        return silu_gated(self(x)) if activation == "silu_gated" else self.relu_squared(x)

    def relu_squared(self, x: Tensor) -> Tensor:
        """Compute ``max(x W^T + bias, 0)^2`` (Primer, arXiv:2109.08668)."""
        if self.packed is not None:
            return self.packed(x, relu_squared=True)
        return relu_squared(self._multiply(x))

    def _multiply(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        y = self.product(x, self.weight, self.bias)
        return y if self.scale is None else (y * self.scale).to(y.dtype)


def silu_gated(x: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` ``[n, I]``. Each row of ``x`` ``[n, 2 I]`` holds ``gate``, then ``up``."""
    gate, up = x.chunk(2, dim=1)
    return silu_gate(up, gate)


def stored_alike(weights: StoredWeights, dtype: torch.dtype) -> StoredWeights:
    """Return the weights unchanged if all are quantised to one dtype, or if none is quantised.

    Otherwise return all of them in ``dtype``, without quantisation.
    """
    kinds = {w.values.dtype if isinstance(w, QuantizedWeight) else None for w in weights}
    if len(kinds) == 1:
        return weights
    logger.info("%d weights that belong together are quantised differently: kept in %s", len(weights), dtype)
    return [w if isinstance(w, Tensor) else w.dequantized(dtype) for w in weights]


def joined(weights: StoredWeights, dtype: torch.dtype) -> Tensor | QuantizedWeight:
    """Join weights ``[out, in]`` that have the same inputs. Their outputs are concatenated."""
    weights = stored_alike(weights, dtype)
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    return join(quantized) if quantized else torch.cat([w for w in weights if isinstance(w, Tensor)])


def _scaled(weight: Tensor | QuantizedWeight, scale: float | Tensor) -> Tensor | QuantizedWeight:
    """Multiply the rows of ``[out, in]`` by one number, or each row by its own number."""
    if isinstance(weight, QuantizedWeight):
        return weight.scaled(scale)
    return weight * (scale[:, None] if isinstance(scale, Tensor) else scale)
