"""The norm at the end of a recurrent mixer, with its gate: RMS norm over groups of channels.

    gated_group_rms_norm       u = y * silu(z),   out = u / sqrt(group_mean(u^2) + eps) * weight
    group_rms_norm_then_gate   out = y / sqrt(group_mean(y^2) + eps) * weight * silu(z)

where group_mean is the mean over a channel's group.
Mamba-2 has the first form (arXiv:2405.21060, section 7). Gated DeltaNet has the second, with one head per
group (arXiv:2412.06464), and so do Mamba-2 layers of some checkpoints (``mamba_norm_before_gate``). The gate
without a norm is in kernels/norms/silu_gate.py.

Computation is in float32 (float64 for float64 inputs), rounded once to y's dtype. On CPU, numba handles
float32 and the reference handles other dtypes.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from kernels.cpu.exp import exp_f32
from kernels.cpu.jit import CpuKernel, FlatArray, cpu_jit
from kernels.cpu.vector import lanes, load, multiply, multiply_add, silu, splat, store, sum_of
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.norms.silu_gate import gate_four


def gated_group_rms_norm_reference(
    y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, *, group_size: int, eps: float
) -> torch.Tensor:
    """Reference of :func:`gated_group_rms_norm`, computed term by term."""
    acc = torch.promote_types(y.dtype, torch.float32)
    gated = y.to(acc) * F.silu(z.to(acc))
    return (_normalized(gated, group_size, eps) * weight.to(acc)).to(y.dtype)


def group_rms_norm_then_gate_reference(
    y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, *, group_size: int, eps: float
) -> torch.Tensor:
    """Reference of :func:`group_rms_norm_then_gate`, computed term by term."""
    acc = torch.promote_types(y.dtype, torch.float32)
    return (_normalized(y.to(acc), group_size, eps) * weight.to(acc) * F.silu(z.to(acc))).to(y.dtype)


def _normalized(u: torch.Tensor, group_size: int, eps: float) -> torch.Tensor:
    groups = torch.unflatten(u, -1, (-1, group_size))
    return (groups * torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + eps)).flatten(-2)


# One program handles GROUPS groups of one token. So even one token fills several SMs if it has more than
# GROUPS groups, and groups as small as a head don't leave warps idle. Groups stay in registers between the
# sum of squares and the scaling: y and z are read once, out is written once. z is read in place from the
# input projection's output.
@triton_jit
def _gated_norm_kernel(
    y_ptr,
    z_ptr,
    weight_ptr,
    out_ptr,
    y_stride,
    z_stride,
    out_stride,
    num_groups,
    group_size,
    EPS: tl.constexpr,  # as a number it would be a float32, too coarse for sums in float64
    GATE_FIRST: tl.constexpr,
    ACC: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    offsets = tl.arange(0, BLOCK)
    live = (groups < num_groups)[:, None] & (offsets < group_size)[None, :]
    columns = groups[:, None] * group_size + offsets[None, :]
    y = tl.load(y_ptr + token * y_stride + columns, mask=live, other=0.0).to(ACC)
    z = tl.load(z_ptr + token * z_stride + columns, mask=live, other=0.0).to(ACC)
    weight = tl.load(weight_ptr + columns, mask=live, other=0.0).to(ACC)
    gate = z / (1.0 + tl.exp(-z))
    if GATE_FIRST:
        y *= gate
    inverse = 1.0 / tl.sqrt(tl.sum(y * y, axis=1) / group_size + EPS)
    out = y * inverse[:, None] * weight
    if not GATE_FIRST:
        out *= gate
    tl.store(out_ptr + token * out_stride + columns, out.to(out_ptr.dtype.element_ty), mask=live)


def _launch(
    y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, group_size: int, eps: float, gate_first: bool
) -> torch.Tensor:
    num_tokens, width = y.shape
    out = torch.empty((num_tokens, width), dtype=y.dtype, device=y.device)
    if num_tokens == 0:
        return out
    block, num_groups = triton.next_power_of_2(group_size), width // group_size
    groups = min(triton.next_power_of_2(num_groups), max(1, _TILE_ELEMENTS // block))
    _gated_norm_kernel[(num_tokens, triton.cdiv(num_groups, groups))](
        y,
        z,
        weight,
        out,
        y.stride(0),
        z.stride(0),
        out.stride(0),
        num_groups,
        group_size,
        EPS=eps,
        GATE_FIRST=gate_first,
        ACC=tl.float64 if y.dtype == torch.float64 else tl.float32,
        GROUPS=groups,
        BLOCK=block,
        num_warps=min(16, max(1, groups * block // 256)),
    )
    return out


_TILE_ELEMENTS = 512  # a program takes so many if groups are small: two warps load 16 bytes per thread


# On a CPU a group takes two passes, the second from the first cache. Some rows together take the first pass.
# Between the passes the roots and quotients of all their groups are computed as vectors: one takes as long as
# some twenty vectors of the first pass, and the core does not look far enough ahead to fill that time.
@cpu_jit
def _invert_roots(sums, count, group_size, eps):
    """Turn the first ``count`` sums of squares into ``1 / sqrt(mean + eps)``."""
    for g in range(count):
        sums[g] = np.float32(1 / np.sqrt(sums[g] / group_size + eps))


@cpu_jit
def _gated_group_rms_norm_cpu(y, y_stride, z, z_stride, weight, group_size, eps, out, begin, end):
    width, w = weight.shape[0], lanes()
    whole, num_rows = group_size - group_size % w, max(1, _CACHED_ELEMENTS // width)
    scales = np.empty(num_rows * (width // group_size), np.float32)
    for first in range(begin, end, num_rows):
        last, g = min(first + num_rows, end), 0
        for i in range(first, last):
            for start in range(0, width, group_size):
                a, b, o = i * y_stride + start, i * z_stride + start, i * width + start
                sums = splat(_ZERO)
                fours = whole - whole % (4 * w)
                for j in range(0, fours, 4 * w):
                    u0, u1, u2, u3 = gate_four(y, a + j, z, b + j, out, o + j)
                    sums = multiply_add(u1, u1, multiply_add(u0, u0, sums))
                    sums = multiply_add(u3, u3, multiply_add(u2, u2, sums))
                for j in range(fours, whole, w):
                    gated = multiply(load(y, a + j), silu(load(z, b + j)))
                    store(out, o + j, gated)
                    sums = multiply_add(gated, gated, sums)
                squares = sum_of(sums)
                for j in range(whole, group_size):
                    out[o + j] = y[a + j] * np.divide(z[b + j], _ONE + exp_f32(-z[b + j]))
                    squares += out[o + j] * out[o + j]
                scales[g] = squares
                g += 1
        _invert_roots(scales, g, group_size, eps)
        g = 0
        for i in range(first, last):
            for start in range(0, width, group_size):
                o, scale = i * width + start, splat(scales[g])
                for j in range(0, whole, w):
                    store(out, o + j, multiply(multiply(load(out, o + j), scale), load(weight, start + j)))
                for j in range(whole, group_size):
                    out[o + j] = out[o + j] * scales[g] * weight[start + j]
                g += 1


@cpu_jit
def _group_rms_norm_then_gate_cpu(y, y_stride, z, z_stride, weight, group_size, eps, out, begin, end):
    width, w = weight.shape[0], lanes()
    whole, num_rows = group_size - group_size % w, max(1, _CACHED_ELEMENTS // width)
    scales = np.empty(num_rows * (width // group_size), np.float32)
    for first in range(begin, end, num_rows):
        last, g = min(first + num_rows, end), 0
        for i in range(first, last):
            for a in range(i * y_stride, i * y_stride + width, group_size):
                sums = splat(_ZERO)
                for j in range(0, whole, w):
                    element = load(y, a + j)
                    sums = multiply_add(element, element, sums)
                squares = sum_of(sums)
                for j in range(whole, group_size):
                    squares += y[a + j] * y[a + j]
                scales[g] = squares
                g += 1
        _invert_roots(scales, g, group_size, eps)
        g = 0
        for i in range(first, last):
            for start in range(0, width, group_size):
                a, b, o = i * y_stride + start, i * z_stride + start, i * width + start
                scale = splat(scales[g])
                for j in range(0, whole, w):
                    store(out, o + j, multiply(multiply(load(y, a + j), scale), load(weight, start + j)))
                fours = whole - whole % (4 * w)
                for j in range(0, fours, 4 * w):
                    gate_four(out, o + j, z, b + j, out, o + j)
                for j in range(fours, whole, w):
                    store(out, o + j, multiply(load(out, o + j), silu(load(z, b + j))))
                for j in range(whole, group_size):
                    gate = np.divide(z[b + j], _ONE + exp_f32(-z[b + j]))
                    out[o + j] = y[a + j] * scales[g] * weight[start + j] * gate
                g += 1


_CACHED_ELEMENTS = 2048  # of each operand; several operands fit into the first cache
_ZERO, _ONE = np.float32(0), np.float32(1)
_GRAIN_ELEMENTS = 2**18  # a thread's minimum share: about 100 µs


def gated_group_rms_norm(
    y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, *, group_size: int, eps: float
) -> torch.Tensor:
    """Gate y by silu(z), normalize each group of ``group_size`` channels, and scale by weight.

    y and z are ``[tokens, d]`` and may be column slices of wider tensors; weight is ``[d]``. Returns
    ``[tokens, d]`` in y's dtype.
    """
    if y.is_cuda:
        return _launch(y, z, weight, group_size, eps, gate_first=True)
    if not y.dtype == z.dtype == weight.dtype == torch.float32:
        return gated_group_rms_norm_reference(y, z, weight, group_size=group_size, eps=eps)
    return _on_cpu(_gated_group_rms_norm_cpu, y, z, weight, group_size, eps)


def group_rms_norm_then_gate(
    y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, *, group_size: int, eps: float
) -> torch.Tensor:
    """Normalize each group of ``group_size`` channels of y, scale by weight, and gate by silu(z).

    y and z are ``[tokens, d]`` and may be column slices of wider tensors; weight is ``[d]``. Returns
    ``[tokens, d]`` in y's dtype.
    """
    if y.is_cuda:
        return _launch(y, z, weight, group_size, eps, gate_first=False)
    if not y.dtype == z.dtype == weight.dtype == torch.float32:
        return group_rms_norm_then_gate_reference(y, z, weight, group_size=group_size, eps=eps)
    return _on_cpu(_group_rms_norm_then_gate_cpu, y, z, weight, group_size, eps)


def _on_cpu(
    kernel: CpuKernel, y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, group_size: int, eps: float
) -> torch.Tensor:
    num_tokens, width = y.shape
    out = torch.empty((num_tokens, width), dtype=y.dtype)
    kernel.parallel_for(
        num_tokens,
        1 + _GRAIN_ELEMENTS // width,
        FlatArray(y),
        y.stride(0),
        FlatArray(z),
        z.stride(0),
        weight,
        group_size,
        eps,
        FlatArray(out),
    )
    return out
