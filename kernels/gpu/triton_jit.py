"""Triton if this process may use it. Without Triton the kernels' modules can still be imported and serve the
CPU.

A kernel's module imports ``tl``, ``triton`` and the decorator ``triton_jit`` from here. On a machine without
GPUs, importing Triton and decorating the kernels would be a tenth of the time that a server takes to start.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

# A product is rounded before it is added. A compiler that fuses the two decides so for each program alone. A
# position would have other last bits in programs with other numbers of positions: seen on an H200. Triton has
# the same default from 3.10 on.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")

if torch.cuda.device_count() > 0 or "TRITON_INTERPRET" in os.environ or "triton" in sys.modules:
    # There is a GPU, or kernels are to be interpreted, or somebody wants to compile them for another machine.
    # Counting GPUs makes no CUDA context (it asks NVML).
    try:
        import triton
        import triton.language as tl
    except ImportError:  # no wheels for this platform
        triton = tl = None
else:
    triton = tl = None

__all__ = ["RUNTIME_SIZES", "tl", "triton", "triton_jit"]

RUNTIME_SIZES = {
    "layer_seed",
    "num_columns",
    "num_pairs",
    "num_positions",
    "num_rows",
    "num_splits",
    "num_stripes",
    "num_tokens",
    "num_shares",
    "share",
    "shift",
    "table_stride",
    "unit_words",
}
"""Arguments of kernels that change from step to step. Triton would compile a kernel again when such a number
is 1 for the first time, or a multiple of 16, and a request would wait for it. Numbers that a model fixes are
not here: if Triton knows that a width is a multiple of 16, it moves 16 bytes at a time."""


if TYPE_CHECKING:  # Triton's language is not Python
    from typing import no_type_check as triton_jit
else:

    def triton_jit(fn: Callable[..., Any]) -> Any:
        """Apply ``triton.jit``. Without Triton, return the plain function, which only a GPU would launch."""
        if triton is None:
            return fn
        sizes = [name for name in inspect.signature(fn).parameters if name in RUNTIME_SIZES]
        return triton.jit(fn, do_not_specialize=sizes)
