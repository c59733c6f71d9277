"""Strides that kernels require: the last axis must be contiguous."""

from __future__ import annotations

from torch import Tensor


def adjacent(tensor: Tensor) -> Tensor:
    """Return the tensor with a contiguous last axis, other axes at any stride; copies only if necessary."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
