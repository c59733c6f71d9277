"""Strides that kernels ask for: they find the elements of the last axis side by side."""

from __future__ import annotations

from torch import Tensor


def adjacent(tensor: Tensor) -> Tensor:
    """The tensor with its last axis adjacent, the others at any stride; copied only where need be."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
