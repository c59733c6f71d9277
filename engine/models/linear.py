"""A linear layer that picks its GEMM by the work there is.

On CPU, float32, per call of ``n`` rows (µs, one thread of an AVX-512 machine; torch calls MKL):

| weight | n | torch | oneDNN, weight packed |
|---|---|---|---|
| 128 × 128 | 1 / 32 | 2 / 13 | 11 / 14 |
| 1168 × 256 | 1 / 4 / 32 / 256 | 18 / 51 / 206 / 1530 | 25 / 28 / 99 / 660 |
| 4096 × 1024 | 1 / 4 | 262 / 939 | 205 / 268 |

So small products go to torch on the weight where it is mapped, larger ones to oneDNN on a copy in its
own blocked layout. A weight large enough for oneDNN at any ``n`` is kept in that layout alone.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.weights import WHOLE, Part, Weights

logger = logging.getLogger(__name__)

ONEDNN_MIN_WORK = 2**19
"""Multiply-adds of one call above which oneDNN's 9 µs of call overhead pay off."""


class Linear:
    """``x W^T + bias``"""

    __slots__ = ("bias", "in_features", "out_features", "packed", "size", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.size = weight.numel()
        self.bias = bias
        packable = weight.device.type == "cpu" and weight.dtype == torch.float32 and _has_onednn()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight) if packable else None
        self.weight = None if packable and self.size >= ONEDNN_MIN_WORK else weight

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
    ) -> Linear:
        """Loads ``name.weight`` ``[out, in]`` and, where the layer has one, ``name.bias`` ``[out]``.

        Of a part of the inputs the bias must be added once among the ranks: pass ``bias`` on one of them.
        """
        weight = weights.take(f"{name}.weight", (out_features, in_features), part=part)
        if not bias:
            return cls(weight)
        return cls(
            weight, weights.take(f"{name}.bias", (out_features,), part=part if part.axis == 0 else WHOLE)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """``[n, in]`` to ``[n, out]``"""
        num_rows = x.shape[0]
        if self.weight is not None and (self.packed is None or num_rows * self.size < ONEDNN_MIN_WORK):
            return F.linear(x, self.weight, self.bias)
        padded_rows = _padded(num_rows)
        if padded_rows != num_rows:
            x = F.pad(x, (0, 0, 0, padded_rows - num_rows))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y[:num_rows]


def _padded(num_rows: int) -> int:
    """Rows that oneDNN computes for ``num_rows``.

    oneDNN compiles a kernel for every new shape, 150 to 500 µs each. Prompts come in every length, so
    lengths above a decode batch's are rounded up (by at most an eighth from 64 on) to some dozens of sizes.
    """
    if num_rows <= 32:
        return num_rows
    step = max(8, 1 << (num_rows.bit_length() - 4))
    return -(-num_rows // step) * step


@functools.cache
def _has_onednn() -> bool:
    """Looked up once; where it is missing that is said once."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    found = bool(available) and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not found:
        logger.info("this torch has no oneDNN: all CPU GEMMs by torch, up to twice slower from batch 4 on")
    return found
