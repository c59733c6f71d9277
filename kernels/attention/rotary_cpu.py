"""Rotary embedding on CPU.

A token's cosines and sines are computed once; then all of its heads are rotated in vector registers.
Subtracting quarter turns in float64 brings an angle to within an eighth of a turn of 0; this is exact enough
for any position. In that range, cosine and sine are the polynomials of Cephes' cosf and sinf.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from kernels.cpu.jit import FlatArray, cpu_jit
from kernels.cpu.vector import (
    add,
    aligned,
    lanes,
    load,
    multiply,
    store,
    subtract,
)
from kernels.norms.rms_norm import norm_row

_QUARTERS_A_RADIAN, _QUARTER = np.float64(0.63661977236758134), np.float64(1.57079632679489662)
_S3, _S2, _S1 = np.float32(-1.9515295891e-4), np.float32(8.3321608736e-3), np.float32(-1.6666654611e-1)
_C3, _C2 = np.float32(2.443315711809948e-5), np.float32(-1.388731625493765e-3)
_C1 = np.float32(4.166664568298827e-2)
_HALF, _ONE = np.float32(0.5), np.float32(1)


@cpu_jit
def _cos_sin_cpu(position, inv_freq, scaling, cos, sin):
    """Write the scaled cosine and sine of ``float32(position) * inv_freq`` to two arrays ``[half]``."""
    for j in range(inv_freq.shape[0]):
        angle = np.float64(np.float32(position) * inv_freq[j])
        quarters = np.floor(angle * _QUARTERS_A_RADIAN + 0.5)
        r = np.float32(angle - quarters * _QUARTER)
        z = r * r
        s = ((_S3 * z + _S2) * z + _S1) * z * r + r
        c = ((_C3 * z + _C2) * z + _C1) * z * z - _HALF * z + _ONE
        quadrant = np.int32(quarters) & np.int32(3)
        cosine = s if quadrant & 1 else c
        sine = c if quadrant & 1 else s
        cos[j] = scaling * (-cosine if quadrant == 1 or quadrant == 2 else cosine)
        sin[j] = scaling * (-sine if quadrant >= 2 else sine)


@cpu_jit
def _turn(x, o, half, cos, sin):
    w = lanes()
    whole = half - half % w
    for j in range(0, whole, w):
        a, b = load(x, o + j), load(x, o + half + j)
        c, s = load(cos, j), load(sin, j)
        store(x, o + j, subtract(multiply(a, c), multiply(b, s)))
        store(x, o + half + j, add(multiply(b, c), multiply(a, s)))
    for j in range(whole, half):
        a_j, b_j = x[o + j], x[o + half + j]
        x[o + j] = a_j * cos[j] - b_j * sin[j]
        x[o + half + j] = b_j * cos[j] + a_j * sin[j]


@cpu_jit
def _rotary_cpu(q, q_shape, k, k_shape, positions, inv_freq, scaling, begin, end):
    """Rotate tokens ``begin : end``. A shape is ``(token stride, head stride, number of heads)``."""
    half = inv_freq.shape[0]
    cos, sin = aligned(half), aligned(half)
    for i in range(begin, end):
        _cos_sin_cpu(positions[i], inv_freq, scaling, cos, sin)
        for head in range(q_shape[2]):
            _turn(q, i * q_shape[0] + head * q_shape[1], half, cos, sin)
        for head in range(k_shape[2]):
            _turn(k, i * k_shape[0] + head * k_shape[1], half, cos, sin)


@cpu_jit
def _norm_rotary_cpu(
    q, q_shape, q_weight, k, k_shape, k_weight, eps, positions, inv_freq, scaling, begin, end
):
    half = inv_freq.shape[0]
    cos, sin = aligned(half), aligned(half)
    for i in range(begin, end):
        _cos_sin_cpu(positions[i], inv_freq, scaling, cos, sin)
        for head in range(q_shape[2]):
            o = i * q_shape[0] + head * q_shape[1]
            norm_row(q, o, q_weight, 0, q_weight.shape[0], eps, q, o)
            _turn(q, o, half, cos, sin)
        for head in range(k_shape[2]):
            o = i * k_shape[0] + head * k_shape[1]
            norm_row(k, o, k_weight, 0, k_weight.shape[0], eps, k, o)
            _turn(k, o, half, cos, sin)


_GRAIN_ELEMENTS = 2**18  # a thread's minimum share: about 100 µs


def rotate_cpu(q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float) -> None:
    """Compute :func:`kernels.attention.rotary.rotate` in float32."""
    _rotary_cpu.parallel_for(
        len(q),
        _grain(q, k),
        FlatArray(q),
        (*q.stride()[:2], q.shape[1]),
        FlatArray(k),
        (*k.stride()[:2], k.shape[1]),
        positions,
        inv_freq,
        np.float32(scaling),
    )


def norm_and_rotate_cpu(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    positions: Tensor,
    inv_freq: Tensor,
    scaling: float,
) -> None:
    """Compute :func:`kernels.attention.rotary.norm_and_rotate` in float32."""
    _norm_rotary_cpu.parallel_for(
        len(q),
        _grain(q, k),
        FlatArray(q),
        (*q.stride()[:2], q.shape[1]),
        q_weight,
        FlatArray(k),
        (*k.stride()[:2], k.shape[1]),
        k_weight,
        eps,
        positions,
        inv_freq,
        np.float32(scaling),
    )


def _grain(q: Tensor, k: Tensor) -> int:
    return 1 + _GRAIN_ELEMENTS // ((q.shape[1] + k.shape[1]) * q.shape[2])
