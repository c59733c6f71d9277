"""Triton if it is installed. Without Triton the kernels' modules can still be imported and serve the CPU.

A kernel's module imports ``tl``, ``triton`` and the decorator ``triton_jit`` from here.
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


if TYPE_CHECKING:  # Triton's language is not Python
    from typing import no_type_check as triton_jit
else:

    def triton_jit(fn: Callable[..., Any]) -> Any:
        """Apply ``triton.jit``. Without Triton, return the plain function, which only a GPU would launch."""
        return fn if triton is None else triton.jit(fn)
