"""A copy of a kernel's operand whose every other byte, around it and between its elements, is known."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

GUARD_BYTES = 4096
LARGEST_COPY = 1 << 26
"""Operands with more bytes from the first to the last element are used where they are, without guards."""


class GuardedOperand:
    """A tensor of the same shape, strides and content. Bytes that are not its own have the value ``filling``.

    All bits set (255) is a NaN in every float format, and -1 as an integer.
    """

    def __init__(self, original: Tensor, filling: int) -> None:
        self.original, self.filling = original, filling
        self.itemsize = original.element_size()
        self.is_copy = self.fits(original)
        self.tensor = original
        if not self.is_copy:
            return
        self.bytes = torch.full((_span(original) + 2 * GUARD_BYTES,), filling, dtype=torch.uint8)
        first = GUARD_BYTES // self.itemsize
        self.tensor = self.bytes.view(original.dtype).as_strided(original.shape, original.stride(), first)
        if original.numel() > 0:
            distinct(self.tensor).copy_(distinct(original))

    @staticmethod
    def fits(tensor: Tensor) -> bool:
        """Whether the tensor is copied."""
        return _span(tensor) <= LARGEST_COPY

    def assert_guards_are_whole(self) -> None:
        """Asserts that no byte changed except the tensor's own."""
        if not self.is_copy:
            return
        changed = self.bytes != self.filling
        if self.original.numel() > 0:
            strides = (*(stride * self.itemsize for stride in self.original.stride()), 1)
            own = changed.as_strided((*self.original.shape, self.itemsize), strides, GUARD_BYTES)
            distinct(own).fill_(False)
        assert not changed.any(), (
            f"bytes outside the operand changed: {changed.nonzero()[:8].flatten().tolist()}"
        )

    def copy_back(self) -> None:
        """Gives the original the tensor's content."""
        if self.is_copy and self.original.numel() > 0:
            distinct(self.original).copy_(distinct(self.tensor))

    def bits(self) -> np.ndarray:
        """The tensor's elements as bytes."""
        elements = distinct(self.tensor).reshape(-1)
        return torch.empty(len(elements), dtype=elements.dtype).copy_(elements).view(torch.uint8).numpy()


def distinct(tensor: Tensor) -> Tensor:
    """Returns a view without the repetitions of an expanded axis."""
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _span(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    if tensor.numel() == 0:
        return 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * (1 + sum((size - 1) * stride for size, stride in sizes))
