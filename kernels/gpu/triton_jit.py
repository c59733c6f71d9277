"""Triton where it is installed; without it the modules of kernels still import and serve the CPU.

A kernel's module takes ``tl``, ``triton`` and the decorator ``triton_jit`` from here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheels for this platform
    triton = tl = None

__all__ = ["tl", "triton", "triton_jit"]


if TYPE_CHECKING:  # Triton's language is not Python's
    from typing import no_type_check as triton_jit
else:

    def triton_jit(fn: Callable[..., Any]) -> Any:
        """``triton.jit``; the plain function, which only a GPU would launch, where there is no Triton."""
        return fn if triton is None else triton.jit(fn)
