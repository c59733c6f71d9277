"""Gate outputs by a sigmoid: those of attention per element (arXiv:2505.06708), those of a shared expert per
token.

    sigmoid_gate      x[i, h, d] = x[i, h, d] sigmoid(gate[i, h, d])      in place
    add_sigmoid_gated total[i] = total[i] + x[i] sigmoid(gate[i])         in place of total

Computation is in float32 (float64 for float64 inputs), rounded once. On CPU, numba handles float32 and the
references handle other dtypes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.exp import exp_f32
from kernels.cpu.jit import FlatArray, cpu_jit
from kernels.cpu.vector import add, divide, exponential, lanes, load, multiply_add, splat, store, subtract
from kernels.gpu.triton_jit import tl, triton, triton_jit


def sigmoid_gate_reference(x: Tensor, gate: Tensor) -> Tensor:
    """Reference of :func:`sigmoid_gate`; it does not work in place."""
    acc = torch.promote_types(x.dtype, torch.float32)
    return (x.to(acc) * gate.to(acc).sigmoid()).to(x.dtype)


def add_sigmoid_gated_reference(total: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """Reference of :func:`add_sigmoid_gated`; it does not work in place."""
    acc = torch.promote_types(x.dtype, torch.float32)
    return (total.to(acc) + x.to(acc) * gate.to(acc).sigmoid()).to(total.dtype)


# One program per (token, 1,024 elements of its heads). The gate is read in place from a projection's output.
@triton_jit
def _sigmoid_gate_kernel(
    x_ptr,
    gate_ptr,
    gate_token_stride,
    gate_head_stride,
    head_dim,
    size,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = i < size
    gates = gate_ptr + token * gate_token_stride + (i // head_dim) * gate_head_stride + i % head_dim
    gate = tl.load(gates, mask=live, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + token * size + i, mask=live, other=0.0).to(tl.float32)
    y = x / (1.0 + tl.exp(-gate))
    tl.store(x_ptr + token * size + i, y.to(x_ptr.dtype.element_ty), mask=live)


# Like _sigmoid_gate_kernel, but with one gate per token; the gated x is added to total.
@triton_jit
def _add_sigmoid_gated_kernel(total_ptr, x_ptr, gate_ptr, size, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = i < size
    gate = tl.load(gate_ptr + token).to(tl.float32)
    x = tl.load(x_ptr + token * size + i, mask=live, other=0.0).to(tl.float32)
    total = tl.load(total_ptr + token * size + i, mask=live, other=0.0).to(tl.float32)
    total += x / (1.0 + tl.exp(-gate))
    tl.store(total_ptr + token * size + i, total.to(total_ptr.dtype.element_ty), mask=live)


_BLOCK = 1024


def _launch(x: Tensor, gate: Tensor) -> Tensor:
    num_tokens, num_heads, head_dim = x.shape
    size = num_heads * head_dim
    if x.numel() > 0:
        _sigmoid_gate_kernel[(num_tokens, triton.cdiv(size, _BLOCK))](
            x, gate, *gate.stride()[:2], head_dim, size, BLOCK=_BLOCK, num_warps=4
        )
    return x


def _launch_add(total: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    num_tokens, size = x.shape
    if x.numel() > 0:
        _add_sigmoid_gated_kernel[(num_tokens, triton.cdiv(size, _BLOCK))](
            total, x, gate, size, BLOCK=_BLOCK, num_warps=4
        )
    return total


_ZERO, _ONE = np.float32(0), np.float32(1)
_GRAIN_ELEMENTS = 2**18  # a thread's minimum share: about 100 µs


@cpu_jit
def _sigmoid_gate_cpu(x, shape, gate, gate_strides, begin, end):
    num_heads, head_dim = shape
    w = lanes()
    whole = head_dim - head_dim % w
    one, zero = splat(_ONE), splat(_ZERO)
    for i in range(begin, end):
        for head in range(num_heads):
            o = (i * num_heads + head) * head_dim
            g = i * gate_strides[0] + head * gate_strides[1]
            for d in range(0, whole, w):
                weight = add(one, exponential(subtract(zero, load(gate, g + d))))
                store(x, o + d, divide(load(x, o + d), weight))
            for d in range(whole, head_dim):
                x[o + d] = np.divide(x[o + d], _ONE + exp_f32(-gate[g + d]))


@cpu_jit
def _add_sigmoid_gated_cpu(total, x, gate, size, begin, end):
    w = lanes()
    whole = size - size % w
    for i in range(begin, end):
        o = i * size
        weight_i = np.divide(_ONE, _ONE + exp_f32(-gate[i]))
        weight = splat(weight_i)
        for d in range(0, whole, w):
            store(total, o + d, multiply_add(load(x, o + d), weight, load(total, o + d)))
        for d in range(whole, size):
            total[o + d] += x[o + d] * weight_i


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Gate contiguous x ``[n, heads, head_dim]`` in place by gate, which has the same shape. Returns x.

    The gate's tokens and heads may have any stride; a head's elements must be contiguous.
    """
    assert x.is_contiguous(), "x must be contiguous"
    assert gate.stride(2) == 1, "a head's gates must lie side by side"
    if x.is_cuda and x.dtype != torch.float64:
        return _launch(x, gate)
    if x.is_cuda or not x.dtype == gate.dtype == torch.float32:
        return x.copy_(sigmoid_gate_reference(x, gate))
    _sigmoid_gate_cpu.parallel_for(
        len(x),
        1 + _GRAIN_ELEMENTS // (x.shape[1] * x.shape[2]),
        FlatArray(x),
        tuple(x.shape[1:]),
        FlatArray(gate),
        gate.stride()[:2],
    )
    return x


def add_sigmoid_gated(total: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """Add x ``[n, size]``, gated by gate ``[n, 1]``, to total ``[n, size]``, and return total.

    All tensors are contiguous.
    """
    assert total.is_contiguous(), "total must be contiguous"
    assert x.is_contiguous(), "x must be contiguous"
    assert gate.is_contiguous(), "gate must be contiguous"
    if x.is_cuda and x.dtype != torch.float64:
        return _launch_add(total, x, gate)
    if x.is_cuda or not total.dtype == x.dtype == gate.dtype == torch.float32:
        return total.copy_(add_sigmoid_gated_reference(total, x, gate))
    _add_sigmoid_gated_cpu.parallel_for(
        len(x),
        1 + _GRAIN_ELEMENTS // x.shape[1],
        FlatArray(total),
        FlatArray(x),
        FlatArray(gate),
        x.shape[1],
    )
    return total
