"""Triton where it is installed; without it the modules of kernels still import and serve the CPU.

    from kernels.triton_jit import tl, triton, triton_jit

    @triton_jit
    def _scale_kernel(x_ptr, factor, size, BLOCK: tl.constexpr): ...
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
