"""RMS norm over the last axis, alone or fused with the residual addition before it.

    rms_norm(x)        = x / sqrt(mean(x^2) + eps) * weight
    add_rms_norm(x, r) = rms_norm(r + scale * x), r + scale * x

Computation is in float32 (float64 for float64 inputs), rounded once to x's dtype.

| device | float32 | other dtypes |
|---|---|---|
| CUDA | Triton | Triton |
| CPU | numba, in vector registers | reference |
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.cpu.jit import FlatArray, cpu_jit
from kernels.cpu.vector import add, lanes, load, multiply, multiply_add, prefetch, splat, store, sum_of
from kernels.gpu.strides import adjacent
from kernels.gpu.triton_jit import tl, triton, triton_jit


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Reference of :func:`rms_norm`, computed term by term."""
    acc = torch.promote_types(x.dtype, torch.float32)
    x_acc = x.to(acc)
    variance = x_acc.square().mean(dim=-1, keepdim=True)
    return (x_acc * torch.rsqrt(variance + eps) * weight.to(acc)).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of :func:`add_rms_norm`: round the sum to the wider of the two dtypes, then normalize it."""
    total = residual + (x if scale == 1.0 else x * scale)
    return rms_norm_reference(total, weight, eps).to(x.dtype), total


# One program per row, with the whole row in registers: one read and one write, no second pass. A decode step
# has few rows, so latency matters: the number of warps grows with the length of a row, and a thread holds 8
# to 32 elements. The residual is read, and the sum written, in the same pass.
@triton_jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    hidden_size,
    eps,
    scale,
    HAS_RESIDUAL: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    live = columns < hidden_size
    x = tl.load(x_ptr + row * x_stride + columns, mask=live, other=0.0).to(ACC)
    if HAS_RESIDUAL:
        x = x * scale + tl.load(residual_ptr + row * residual_stride + columns, mask=live, other=0.0).to(ACC)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * hidden_size + columns, total, mask=live)
        x = total.to(ACC)  # normalize the stored, rounded sum
    weight = tl.load(weight_ptr + columns, mask=live, other=0.0).to(ACC)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / hidden_size + eps)
    y = x * inverse * weight
    tl.store(y_ptr + row * hidden_size + columns, y.to(y_ptr.dtype.element_ty), mask=live)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden_size = x.shape[-1]
    x_rows = _as_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if residual is None:
        residual_rows, total = x_rows, y  # not touched
    else:
        residual_rows = _as_rows(residual)
        total = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    if x_rows.shape[0] == 0:
        return y, total
    block = triton.next_power_of_2(hidden_size)
    _rms_norm_kernel[(x_rows.shape[0],)](
        x_rows,
        residual_rows,
        weight,
        y,
        total,
        x_rows.stride(0),
        residual_rows.stride(0),
        hidden_size,
        eps,
        scale,
        HAS_RESIDUAL=residual is not None,
        ACC=tl.float64 if x.dtype == torch.float64 else tl.float32,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return y, total


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``[..., H]`` as ``[rows, H]`` of contiguous rows at any stride. Copies only if necessary."""
    return adjacent(x.reshape(-1, x.shape[-1]))


@cpu_jit
def sum_of_squares(x, a, size):
    """Return the sum of squares of ``x[a:]``, ``size`` elements; four sums, since each waits for its last."""
    w, zero = lanes(), splat(_ZERO)
    whole = size - size % w
    fours = whole - whole % (4 * w)
    s0, s1, s2, s3 = zero, zero, zero, zero
    for j in range(a, a + fours, 4 * w):
        x0, x1, x2, x3 = load(x, j), load(x, j + w), load(x, j + 2 * w), load(x, j + 3 * w)
        s0, s1 = multiply_add(x0, x0, s0), multiply_add(x1, x1, s1)
        s2, s3 = multiply_add(x2, x2, s2), multiply_add(x3, x3, s3)
    for j in range(a + fours, a + whole, w):
        element = load(x, j)
        s0 = multiply_add(element, element, s0)
    squares = sum_of(add(add(s0, s1), add(s2, s3)))
    for j in range(a + whole, a + size):
        squares += x[j] * x[j]
    return squares


@cpu_jit
def norm_row(x, a, weight, b, size, eps, y, c):
    """Compute ``y[c:] = rms_norm(x[a:]) * weight[b:]`` for ``size`` elements; y may be x itself."""
    w = lanes()
    whole = size - size % w
    squares = sum_of_squares(x, a, size)
    inverse = np.float32(1 / np.sqrt(squares / size + eps))
    scale = splat(inverse)
    for j in range(0, whole, w):
        store(y, c + j, multiply(multiply(load(x, a + j), scale), load(weight, b + j)))
    for j in range(whole, size):
        y[c + j] = x[a + j] * inverse * weight[b + j]


# Arrays are flat, so that one compiled version serves tensors with any number of axes.
@cpu_jit
def _rms_norm_cpu(x, weight, eps, y, begin, end):
    size = weight.shape[0]
    for i in range(begin, end):
        norm_row(x, i * size, weight, 0, size, eps, y, i * size)


@cpu_jit
def _add_rms_norm_cpu(x, residual, weight, eps, scale, y, total, begin, end):
    w, hidden_size = lanes(), weight.shape[0]
    factor = splat(scale)
    whole = hidden_size - hidden_size % w
    for i in range(begin, end):
        o = i * hidden_size
        ahead = min(i + 1, end - 1) * hidden_size  # fetched now, since norm_row reads nothing new
        for j in range(0, whole, w):
            prefetch(x, ahead + j)
            prefetch(residual, ahead + j)
            store(total, o + j, multiply_add(load(x, o + j), factor, load(residual, o + j)))
        for j in range(whole, hidden_size):
            total[o + j] = residual[o + j] + x[o + j] * scale
        norm_row(total, o, weight, 0, hidden_size, eps, y, o)


_ZERO = np.float32(0)
_GRAIN_ELEMENTS = 2**18  # a thread's minimum share: about 100 µs


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize x ``[..., H]`` over its last axis and scale it by weight ``[H]``."""
    if x.is_cuda:
        return _launch(x, None, weight, eps)[0]
    if not x.dtype == weight.dtype == torch.float32:
        return rms_norm_reference(x, weight, eps)
    hidden_size = weight.shape[0]
    x = x.contiguous()
    y = torch.empty_like(x)
    _rms_norm_cpu.parallel_for(
        x.numel() // hidden_size,
        1 + _GRAIN_ELEMENTS // hidden_size,
        FlatArray(x),
        weight,
        eps,
        FlatArray(y),
    )
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``rms_norm(residual + scale * x)`` and the sum itself, all ``[..., H]``.

    The residual stream may be wider (float32) than x; the sum has the wider dtype.
    """
    if x.is_cuda:
        return _launch(x, residual, weight, eps, scale)
    if not x.dtype == residual.dtype == weight.dtype == torch.float32:
        return add_rms_norm_reference(x, residual, weight, eps, scale=scale)
    hidden_size = weight.shape[0]
    x, residual = x.contiguous(), residual.contiguous()
    y, total = torch.empty_like(x), torch.empty_like(x)
    _add_rms_norm_cpu.parallel_for(
        x.numel() // hidden_size,
        1 + _GRAIN_ELEMENTS // hidden_size,
        FlatArray(x),
        FlatArray(residual),
        weight,
        eps,
        np.float32(scale),
        FlatArray(y),
        FlatArray(total),
    )
    return y, total
