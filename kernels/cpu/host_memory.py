"""Large tensors in host memory, on huge pages wherever the system gives them to those who ask (Linux:
``transparent_hugepage`` ``madvise``, the usual setting).

torch does not ask, NumPy does, from 4 MB on. Weights, KV and states are read end to end: with pages of 4 KB a
core's prefetchers stop at each page's end, and filling the memory for the first time takes a fault a page.
One row times a float32 matrix of 12,288 x 2,048, a thread of a shared AVX-512 machine: 10.0 GB/s on pages of
4 KB, 12.7 GB/s on huge ones.
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
    """``[num_elements]``, which begin at a huge page if they fill one, else at a cache line."""
    return _aligned(np.empty, num_elements, dtype)


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Aligned likewise; pages that nobody writes to take no memory.

    The C library's large pieces begin 16 bytes into a page, where every vector of a cache line's size lies
    across two of them: the update of states then takes 2.3 times as long.
    """
    return _aligned(np.zeros, math.prod(shape), dtype).view(shape)


def _aligned(allocate: Callable[..., Any], num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    num_bytes = num_elements * dtype.itemsize
    unit = HUGE_PAGE if num_bytes >= HUGE_PAGE else CACHE_LINE
    memory = torch.from_numpy(allocate(num_bytes + unit, dtype=np.uint8))
    skipped = -memory.data_ptr() % unit
    return memory[skipped : skipped + num_bytes].view(dtype)


def keep_freed_memory() -> None:
    """Tells the C library not to return what is freed to the system (glibc; elsewhere nothing).

    A prompt's activations are some megabytes each. By default each is mapped anew and faults once a page:
    25,000 faults, 80 ms of system time, in a prompt of 256 tokens of a 120 M model.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 2**25)  # the most that it takes
        libc.mallopt(_M_TRIM_THRESHOLD, 2**30)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
