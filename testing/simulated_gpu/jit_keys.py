"""The variants of Triton kernels that launches need. Each variant is compiled when it is first launched.

A variant is named by what Triton specialises a kernel on (``triton/runtime/jit.py``):

| argument | part of the key |
|---|---|
| ``tl.constexpr``, None | its value |
| tensor | dtype, and whether its address is a multiple of 16 |
| integer | type; unless the kernel says ``do_not_specialize``: whether it is 1, or a multiple of 16 |
| other number | type |
| ``num_warps``, ``num_stages`` … | its value |
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor

from kernels.gpu.triton_jit import RUNTIME_SIZES, triton
from testing.simulated_gpu.kernels import Launch

JitKey = tuple[str, tuple[tuple[str, Any], ...]]
"""The kernel's name, then name and key of each argument."""
_ALIGNMENT = 16


def jit_key(launch: Launch) -> JitKey:
    """Return the variant that a launch needs."""
    function = _function(launch.kernel.fn)
    bound = function.signature.bind_partial(
        *launch.args,
        **{name: one for name, one in launch.kwargs.items() if name in function.signature.parameters},
    )
    bound.apply_defaults()
    options = {name: one for name, one in launch.kwargs.items() if name not in bound.arguments}
    parts = [(one.name, _part(one, bound.arguments[one.name])) for one in function.params]
    return launch.kernel.fn.__name__, (*parts, *sorted(options.items()))


@functools.cache
def _function(fn: Any) -> Any:
    """Return the kernel as Triton compiles it, also in a process that interprets kernels."""
    sizes = RUNTIME_SIZES & inspect.signature(fn).parameters.keys()
    return triton.runtime.JITFunction(fn, do_not_specialize=sorted(sizes))


def _part(param: Any, value: Any) -> Any:
    if param.is_constexpr or value is None:
        return value
    if isinstance(value, Tensor):
        return str(value.dtype), value.data_ptr() % _ALIGNMENT == 0
    if isinstance(value, bool) or not isinstance(value, int):
        return type(value).__name__
    kind = "i32" if -(1 << 31) <= value < 1 << 31 else "i64" if value < 1 << 63 else "u64"
    if param.do_not_specialize:
        return kind
    return kind, value == 1, value % _ALIGNMENT == 0
