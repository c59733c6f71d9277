"""The torch operators that may be captured in a graph, by the dtypes of their operands and results.

Each was looked up in torch's CUDA sources: none reads a value on the host, copies from host memory, or takes
another way for some dtype (``_grouped_mm`` does, outside bfloat16). Temporary memory comes from the
allocator, which a capture allows. Before you add one, look it up too.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SHORT = {
    torch.bool: "b",
    torch.bfloat16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int32: "i32",
    torch.int64: "i64",
}
_ALLOWED = {
    "__and__": ["b", "b i32"],
    "__or__": ["b"],
    "_grouped_mm": ["f16 i32"],
    "_softmax": ["f32"],
    "abs": ["f32"],
    "add": ["f16", "f32", "i32", "i32 i64", "i64"],
    "add_": ["f16", "f32", "i32"],
    "amax": ["f32"],
    "amin": ["i64"],
    "arange": ["i64"],
    "argmax": ["f32 i64"],
    "argmin": ["f64 i64"],
    "cat": ["f16", "f32", "i64"],
    "ceil": ["f64"],
    "clamp": ["i64"],
    "clamp_": ["i32", "i64"],
    "contiguous": ["i64"],
    "copy_": ["f16", "f16 f32", "f32", "i32"],
    "cumsum_": ["i64"],
    "div": ["f32"],
    "embedding": ["f16 i64", "f32 i64"],
    "eq": ["b f32", "b i64"],
    "fill_": ["i32"],
    "floor_divide": ["i64"],
    "full_like": ["i64"],
    "gather": ["f32 i64", "i32 i64", "i64"],
    "ge": ["b i64"],
    "gt": ["b f32", "b i32", "b i64"],
    "index": ["b i64", "f16 i64", "f32 i64", "i32 i64", "i64"],
    "index_put_": ["i64"],
    "linear": ["f16", "f32"],
    "lt": ["b f32", "b i32 i64", "b i64"],
    "masked_fill_": ["b f32"],
    "max": ["f32 i64"],
    "minimum": ["i64"],
    "mul": ["b f32", "f32", "f32 i32", "f64 i64", "i32 i64", "i64"],
    "neg": ["f32"],
    "new_zeros": ["i32", "i32 i64"],
    "ones_like": ["i32 i64"],
    "remainder": ["i64"],
    "reshape": ["i64"],
    "scatter_": ["i32 i64"],
    "scatter_add_": ["f32 i64", "i32 i64"],
    "searchsorted": ["f32 i64", "i64"],
    "softmax": ["f32"],
    "sort": ["f32 i64"],
    "sub": ["i32", "i64"],
    "sub_": ["f32"],
    "to": ["b i32", "f16 f32", "f32 f64", "f32 i64", "f64 i64", "i32 i64"],
    "where": ["b f32", "b i32", "b i64"],
    "zeros_like": ["b f32"],
}


def reason_to_refuse(name: str, operands: list[Tensor]) -> str:
    """Return why a capture may not hold this operator; empty if it may. ``operands`` include results."""
    dtypes = " ".join(sorted({_SHORT.get(one.dtype, str(one.dtype)) for one in operands}))
    if dtypes in _ALLOWED.get(name, ()):
        return ""
    return f"{name} of {dtypes or 'no tensor'} is not among the operators that may be captured"
