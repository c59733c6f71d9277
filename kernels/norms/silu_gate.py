"""A gate without a norm: ``out = y * silu(z)`` with ``silu(z) = z / (1 + e^-z)``.

It is used at the end of a Mamba-2 mixer without a norm, and in a gated MLP (SwiGLU, arXiv:2002.05202) with z
as the gate. Computation is in float32 (float64 for float64 inputs), rounded once to y's dtype. On CPU, numba
handles float32 and the reference handles other dtypes.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from kernels.cpu.exp import exp_f32
from kernels.cpu.jit import FlatArray, cpu_jit
from kernels.cpu.vector import lanes, load, multiply, silu, store
from kernels.gpu.triton_jit import tl, triton, triton_jit

_BLOCK = 1024


def silu_gate_reference(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Reference of :func:`silu_gate`, with torch's operators."""
    acc = torch.promote_types(y.dtype, torch.float32)
    return (y.to(acc) * F.silu(z.to(acc))).to(y.dtype)


# One program per (token, 1,024 neighbouring channels): one 16-byte load for each of 128 threads in bfloat16.
# y and z are read in place, such as from the output of a projection that has y and z side by side.
@triton_jit
def _silu_gate_kernel(
    y_ptr, z_ptr, out_ptr, y_stride, z_stride, width, ACC: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < width
    y = tl.load(y_ptr + token * y_stride + columns, mask=live, other=0.0).to(ACC)
    z = tl.load(z_ptr + token * z_stride + columns, mask=live, other=0.0).to(ACC)
    out = y * (z / (1.0 + tl.exp(-z)))
    tl.store(out_ptr + token * width + columns, out.to(out_ptr.dtype.element_ty), mask=live)


def _launch(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    num_tokens, width = y.shape
    out = torch.empty((num_tokens, width), dtype=y.dtype, device=y.device)
    if out.numel() > 0:
        acc = tl.float64 if y.dtype == torch.float64 else tl.float32
        _silu_gate_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
            y, z, out, y.stride(0), z.stride(0), width, ACC=acc, BLOCK=_BLOCK, num_warps=4
        )
    return out


@cpu_jit
def gate_four(y, a, z, b, out, c):
    """Compute ``out[c:] = y[a:] * silu(z[b:])`` for four vectors, and return them.

    They share the constants of silu, which AVX2 has too few registers to keep.
    """
    w = lanes()
    u0, u1 = multiply(load(y, a), silu(load(z, b))), multiply(load(y, a + w), silu(load(z, b + w)))
    u2 = multiply(load(y, a + 2 * w), silu(load(z, b + 2 * w)))
    u3 = multiply(load(y, a + 3 * w), silu(load(z, b + 3 * w)))
    store(out, c, u0)
    store(out, c + w, u1)
    store(out, c + 2 * w, u2)
    store(out, c + 3 * w, u3)
    return u0, u1, u2, u3


@cpu_jit
def gate_row(y, a, z, b, size, out, c):
    """Compute ``out[c:] = y[a:] * silu(z[b:])`` for ``size`` elements; y and out may be the same array."""
    w, whole = lanes(), size - size % lanes()
    fours = whole - whole % (4 * w)
    for j in range(0, fours, 4 * w):
        gate_four(y, a + j, z, b + j, out, c + j)
    for j in range(fours, whole, w):
        store(out, c + j, multiply(load(y, a + j), silu(load(z, b + j))))
    for j in range(whole, size):
        out[c + j] = y[a + j] * np.divide(z[b + j], _ONE + exp_f32(-z[b + j]))


@cpu_jit
def _silu_gate_cpu(y, y_stride, z, z_stride, width, out, begin, end):
    for i in range(begin, end):
        gate_row(y, i * y_stride, z, i * z_stride, width, out, i * width)


_ONE = np.float32(1)
_GRAIN_ELEMENTS = 2**18  # a thread's minimum share: about 100 µs


def silu_gate(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Compute ``y * silu(z)`` for y and z ``[tokens, d]``, which may be column slices of wider tensors.

    Returns ``[tokens, d]`` in y's dtype.
    """
    if y.is_cuda:
        return _launch(y, z)
    if not y.dtype == z.dtype == torch.float32:
        return silu_gate_reference(y, z)
    num_tokens, width = y.shape
    out = torch.empty((num_tokens, width), dtype=y.dtype)
    _silu_gate_cpu.parallel_for(
        num_tokens,
        1 + _GRAIN_ELEMENTS // width,
        FlatArray(y),
        y.stride(0),
        FlatArray(z),
        z.stride(0),
        width,
        FlatArray(out),
    )
    return out
