"""Triton where it is installed; without it the modules of kernels still import and serve the CPU.

A kernel's module takes ``tl``, ``triton`` and the decorator ``triton_jit`` from here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheels for this platform
    triton = tl = None

__all__ = ["tl", "triton", "triton_jit"]


def triton_jit(fn: Callable[..., None]) -> Any:
    """``triton.jit``; the plain function, which only a GPU would launch, where there is no Triton."""
    return fn if triton is None else triton.jit(fn)
