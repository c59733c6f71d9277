"""Large tensors in host memory, on huge pages if the system gives huge pages to programs that ask for them
(Linux: ``transparent_hugepage`` ``madvise``, the usual setting).

torch does not ask for huge pages; NumPy does, from 4 MB on. Weights, KV and states are read in order. With
pages of 4 KB a core's prefetchers stop at the end of each page, and the first write to the memory takes one
fault per page. One row times a float32 matrix of 12,288 x 2,048, on one thread of a shared AVX-512 machine:
10.0 GB/s on pages of 4 KB, 12.7 GB/s on huge pages.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

HUGE_PAGE = 2**21
CACHE_LINE = 64


def host_empty(num_elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return ``[num_elements]``, which begins at a huge page if it can fill one, else at a cache line."""
    return _aligned(np.empty, num_elements, dtype)


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros, aligned like :func:`host_empty`. Pages that are never written take no memory.

    The C library's large allocations begin 16 bytes into a page. There every vector of a cache line's size
    crosses two cache lines, and the update of states takes 2.3 times as long.
    """
    return _aligned(np.zeros, math.prod(shape), dtype).view(shape)


def _aligned(allocate: Callable[..., Any], num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    num_bytes = num_elements * dtype.itemsize
    unit = HUGE_PAGE if num_bytes >= HUGE_PAGE else CACHE_LINE
    memory = torch.from_numpy(allocate(num_bytes + unit, dtype=np.uint8))
    skipped = -memory.data_ptr() % unit
    return memory[skipped : skipped + num_bytes].view(dtype)


def keep_freed_memory() -> None:
    """Tell glibc not to return freed memory to the system. With other C libraries this does nothing.

    A prompt's activations are a few megabytes each. By default each tensor is mapped again and faults once
    per page: 25,000 faults, 80 ms of system time, for a prompt of 256 tokens with a 120 M model.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 2**25)  # the largest value that mallopt accepts
        libc.mallopt(_M_TRIM_THRESHOLD, 2**30)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
