"""The norm at the end of a Mamba-2 mixer: gate first, then RMS norm over groups of channels.

    u   = y * silu(z)
    out = u / sqrt(mean over its group of u^2 + eps) * weight

Inside in float32 (float64 for float64 inputs), rounded once to y's dtype. On CPU, float32 goes to numba
and other dtypes to the reference.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from kernels.cpu_exp import exp_f32
from kernels.cpu_jit import as_array, as_flat_array, cpu_jit
from kernels.cpu_vector import (
    add,
    divide,
    exponential,
    lanes,
    load,
    multiply,
    multiply_add,
    splat,
    store,
    subtract,
    sum_of,
)
from kernels.triton_jit import tl, triton, triton_jit


def gated_group_rms_norm_reference(
    y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, *, group_size: int, eps: float
) -> torch.Tensor:
    """:func:`gated_group_rms_norm`, term by term."""
    acc = torch.promote_types(y.dtype, torch.float32)
    gated = (y.to(acc) * F.silu(z.to(acc))).unflatten(-1, (-1, group_size))
    variance = gated.square().mean(dim=-1, keepdim=True)
    return ((gated * torch.rsqrt(variance + eps)).flatten(-2) * weight.to(acc)).to(y.dtype)


# One program a (token, group): groups are independent, so even a batch of one fills some SMs. The group
# stands in registers between the sum of squares and the scaling: y and z are read once, out written once.
# z is read where the input projection left it.
@triton_jit
def _gated_group_rms_norm_kernel(
    y_ptr,
    z_ptr,
    weight_ptr,
    out_ptr,
    y_stride,
    z_stride,
    out_stride,
    group_size,
    eps,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    live = offsets < group_size
    columns = tl.program_id(1) * group_size + offsets
    y = tl.load(y_ptr + token * y_stride + columns, mask=live, other=0.0).to(ACC)
    z = tl.load(z_ptr + token * z_stride + columns, mask=live, other=0.0).to(ACC)
    weight = tl.load(weight_ptr + columns, mask=live, other=0.0).to(ACC)
    gated = y * (z / (1.0 + tl.exp(-z)))
    inverse = 1.0 / tl.sqrt(tl.sum(gated * gated, axis=0) / group_size + eps)
    out = gated * inverse * weight
    tl.store(out_ptr + token * out_stride + columns, out.to(out_ptr.dtype.element_ty), mask=live)


def _launch(
    y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, group_size: int, eps: float
) -> torch.Tensor:
    num_tokens, width = y.shape
    out = torch.empty((num_tokens, width), dtype=y.dtype, device=y.device)
    if num_tokens == 0:
        return out
    block = triton.next_power_of_2(group_size)
    _gated_group_rms_norm_kernel[(num_tokens, width // group_size)](
        y,
        z,
        weight,
        out,
        y.stride(0),
        z.stride(0),
        out.stride(0),
        group_size,
        eps,
        ACC=tl.float64 if y.dtype == torch.float64 else tl.float32,
        BLOCK=block,
        num_warps=min(16, max(1, block // 256)),
    )
    return out


@cpu_jit
def _gated_group_rms_norm_cpu(y, y_stride, z, z_stride, weight, group_size, eps, out, begin, end):
    w, width = lanes(), weight.shape[0]
    whole = group_size - group_size % w
    one, zero = splat(_ONE), splat(_ZERO)
    for i in range(begin, end):
        for start in range(0, width, group_size):
            a, b, c = i * y_stride + start, i * z_stride + start, i * width + start
            sums = zero
            for j in range(0, whole, w):
                gate = load(z, b + j)
                silu = divide(gate, add(one, exponential(subtract(zero, gate))))
                gated = multiply(load(y, a + j), silu)
                store(out, c + j, gated)
                sums = multiply_add(gated, gated, sums)
            squares = sum_of(sums)
            for j in range(whole, group_size):
                gated_j = y[a + j] * np.divide(z[b + j], _ONE + exp_f32(-z[b + j]))
                out[c + j] = gated_j
                squares += gated_j * gated_j
            inverse = np.float32(1 / np.sqrt(squares / group_size + eps))
            scale = splat(inverse)
            for j in range(0, whole, w):
                store(out, c + j, multiply(multiply(load(out, c + j), scale), load(weight, start + j)))
            for j in range(whole, group_size):
                out[c + j] = out[c + j] * inverse * weight[start + j]


_ZERO, _ONE = np.float32(0), np.float32(1)
_GRAIN_ELEMENTS = 2**18  # a thread's least share: about 100 µs


def gated_group_rms_norm(
    y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, *, group_size: int, eps: float
) -> torch.Tensor:
    """Gate y by silu(z), both ``[tokens, d]``, normalize each ``group_size`` channels, scale by weight.

    weight ``[d]``. y and z may be column slices of wider tensors. Returns ``[tokens, d]`` in y's dtype.
    """
    if y.is_cuda:
        return _launch(y, z, weight, group_size, eps)
    if not y.dtype == z.dtype == weight.dtype == torch.float32:
        return gated_group_rms_norm_reference(y, z, weight, group_size=group_size, eps=eps)
    num_tokens, width = y.shape
    out = torch.empty((num_tokens, width), dtype=y.dtype)
    if num_tokens > 0:
        _gated_group_rms_norm_cpu.parallel_for(
            num_tokens,
            1 + _GRAIN_ELEMENTS // width,
            as_flat_array(y),
            y.stride(0),
            as_flat_array(z),
            z.stride(0),
            as_array(weight),
            group_size,
            eps,
            as_array(out).ravel(),
        )
    return out
