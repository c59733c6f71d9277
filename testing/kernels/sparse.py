"""Tensors that reach beyond 2^31 elements and take almost no memory: only touched pages exist."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

FAR = 1 << 31
"""Elements that a signed integer of 32 bits can't count."""
_NO_RESERVE = 0x4000  # Linux: MAP_NORESERVE, which older Pythons don't name


def far_apart(tensor: Tensor) -> Tensor:
    """Returns a copy whose entries along axis 0 lie so far apart that the last is beyond element 2^31.

    The other axes keep their strides.
    """
    return sparse_zeros(tensor.shape, (_far_stride(len(tensor)), *tensor.stride()[1:]), tensor.dtype).copy_(
        tensor
    )


def wide_table(rows: int) -> Tensor:
    """Returns a contiguous int32 table of zeros whose last row begins beyond element 2^31."""
    columns = _far_stride(rows)
    return sparse_zeros((rows, columns), (columns, 1), torch.int32)


def sparse_zeros(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a tensor of zeros. A page of it takes memory once something is written there."""
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, (reach + 1) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def _far_stride(entries: int) -> int:
    """Returns the least multiple of 16 that puts the last of so many entries beyond 2^31."""
    assert entries > 1, "one entry can't be far from another one"
    return (FAR // (entries - 1) // 16 + 1) * 16
