"""Rotary position embedding of queries and keys, in place (RoFormer, arXiv:2104.09864).

    a_j = float32(position) * inv_freq[j]                      float32, j < half
    x[j], x[half + j] = x[j] cos a_j - x[half + j] sin a_j,  x[half + j] cos a_j + x[j] sin a_j

for every head. The first ``2 * half`` elements of a head are rotated, one half with the other as in Llama and
GPT-NeoX; the remaining elements stay. Cosine and sine are scaled by ``attention_scaling``. With norms, all
elements of a head are first replaced by ``x / sqrt(mean(x^2) + eps) * weight``.

The angle a_j is rounded to float32 because checkpoints were trained in this way: at position 100,000 this
rounding changes an angle by up to 0.004. The cosine and sine of the rounded angle are exact to 1e-7. They are
computed without a table, so positions have no limit and nothing is stored. Computation is in float32 (float64
for float64 inputs), and its result is rounded once. On CPU, numba handles float32 (rotary_cpu.py), and the
reference handles other dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.rotary_cpu import norm_and_rotate_cpu, rotate_cpu
from kernels.gpu.triton_jit import tl, triton, triton_jit
from kernels.norms.rms_norm import rms_norm_reference


@dataclass(frozen=True)
class Rotary:
    """The angles by which a head's elements rotate."""

    inv_freq: Tensor
    """``[half]`` float32: radians per position."""
    attention_scaling: float = 1.0


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of single heads; weights ``[head_dim]``."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


def rotate_reference(x: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """Return x ``[n, heads, head_dim]`` rotated, as a new tensor."""
    acc = torch.promote_types(x.dtype, torch.float32)
    angles = positions.to(torch.float32)[:, None, None] * rotary.inv_freq
    cos = angles.to(acc).cos() * rotary.attention_scaling
    sin = angles.to(acc).sin() * rotary.attention_scaling
    half = len(rotary.inv_freq)
    a, b, rest = torch.split(x.to(acc), [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)


def norm_and_rotate_reference(
    x: Tensor, weight: Tensor, eps: float, positions: Tensor, rotary: Rotary
) -> Tensor:
    """Like :func:`rotate_reference`, but normalize each head first."""
    acc = torch.promote_types(x.dtype, torch.float32)
    return rotate_reference(rms_norm_reference(x.to(acc), weight, eps), positions, rotary).to(x.dtype)


# One program per (token, tile of heads); tiles of q come before those of k. A tile's elements (about 2,048)
# stay in registers between norm and rotation, and are read and written once. Each program computes its
# token's cosines and sines itself: a few dozen instructions, which take less time than reading a table.
@triton_jit
def _rotary_kernel(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    positions_ptr,
    inv_freq_ptr,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    q_heads,
    k_heads,
    eps,
    scaling,
    HAS_NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    dims = tl.arange(0, BLOCK_HALF)
    inv_freq = tl.load(inv_freq_ptr + dims, mask=dims < HALF, other=0.0)
    cos, sin = _cos_sin(tl.load(positions_ptr + token).to(tl.float32) * inv_freq)
    cos, sin = cos * scaling, sin * scaling
    q_tiles = tl.cdiv(q_heads, BLOCK_H)
    if tile < q_tiles:
        _rotate_heads(
            q_ptr + token * q_token_stride, q_head_stride, tile * BLOCK_H, q_heads, q_weight_ptr, eps,
            cos, sin, HAS_NORM, HEAD_DIM, HALF, BLOCK_H, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        first = (tile - q_tiles) * BLOCK_H
        _rotate_heads(
            k_ptr + token * k_token_stride, k_head_stride, first, k_heads, k_weight_ptr, eps,
            cos, sin, HAS_NORM, HEAD_DIM, HALF, BLOCK_H, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip


@triton_jit
def _rotate_heads(
    x_ptr, head_stride, first, num_heads, weight_ptr, eps, cos, sin,
    HAS_NORM: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    heads = first + tl.arange(0, BLOCK_H)
    dims, rest_dims = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_REST)
    live = (heads < num_heads)[:, None] & (dims < HALF)[None, :]
    a_ptr = x_ptr + heads[:, None] * head_stride + dims[None, :]
    a = tl.load(a_ptr, mask=live, other=0.0).to(tl.float32)
    b = tl.load(a_ptr + HALF, mask=live, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        if REST > 0:
            rest_ptr = x_ptr + heads[:, None] * head_stride + 2 * HALF + rest_dims[None, :]
            rest_live = (heads < num_heads)[:, None] & (rest_dims < REST)[None, :]
            rest = tl.load(rest_ptr, mask=rest_live, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, axis=1)
        inverse = 1.0 / tl.sqrt(squares / HEAD_DIM + eps)
        a *= inverse[:, None] * tl.load(weight_ptr + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        b *= inverse[:, None] * tl.load(weight_ptr + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        if REST > 0:
            weight = tl.load(weight_ptr + 2 * HALF + rest_dims, mask=rest_dims < REST, other=0.0)
            rest *= inverse[:, None] * weight.to(tl.float32)
            tl.store(rest_ptr, rest.to(x_ptr.dtype.element_ty), mask=rest_live)
    tl.store(a_ptr, (a * cos - b * sin).to(x_ptr.dtype.element_ty), mask=live)
    tl.store(a_ptr + HALF, (b * cos + a * sin).to(x_ptr.dtype.element_ty), mask=live)


@triton_jit
def _cos_sin(angle):
    """Return cosine and sine. As in rotary_cpu.py, the range is reduced in float64; then come the polynomials
    of Cephes' sinf and cosf.
    """
    exact = angle.to(tl.float64)
    quarters = tl.floor(exact * 0.63661977236758134 + 0.5)
    r = (exact - quarters * 1.57079632679489662).to(tl.float32)
    z = r * r
    sin = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * r + r
    cos = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z
    cos += 1.0 - 0.5 * z
    quadrant = quarters.to(tl.int32) & 3
    is_odd = (quadrant & 1) == 1
    cosine, sine = tl.where(is_odd, sin, cos), tl.where(is_odd, cos, sin)
    cosine = tl.where((quadrant == 1) | (quadrant == 2), -cosine, cosine)
    return cosine, tl.where(quadrant >= 2, -sine, sine)


_TILE_ELEMENTS = 2048


def _launch(q: Tensor, k: Tensor, norms: HeadNorms | None, positions: Tensor, rotary: Rotary) -> None:
    num_tokens, q_heads, head_dim = q.shape
    k_heads, half = k.shape[1], len(rotary.inv_freq)
    if num_tokens == 0:
        return
    block_half = triton.next_power_of_2(half)
    block_h = min(triton.next_power_of_2(q_heads), max(1, _TILE_ELEMENTS // triton.next_power_of_2(head_dim)))
    _rotary_kernel[(num_tokens, triton.cdiv(q_heads, block_h) + triton.cdiv(k_heads, block_h))](
        q,
        k,
        q if norms is None else norms.q_weight,  # not touched without norms
        k if norms is None else norms.k_weight,
        positions,
        rotary.inv_freq,
        *q.stride()[:2],
        *k.stride()[:2],
        q_heads,
        k_heads,
        0.0 if norms is None else norms.eps,
        rotary.attention_scaling,
        HAS_NORM=norms is not None,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_H=block_h,
        BLOCK_HALF=block_half,
        BLOCK_REST=triton.next_power_of_2(max(1, head_dim - 2 * half)),
        num_warps=4,
    )


def rotate(q: Tensor, k: Tensor, positions: Tensor, rotary: Rotary) -> None:
    """Rotate q ``[n, QH, D]`` and k ``[n, KVH, D]`` in place by positions ``[n]`` int64.

    QH and KVH are the numbers of query and KV heads; D is head_dim.

    Tokens and heads may have any stride; a head's elements must be contiguous. A padding token may have any
    32-bit position, since its result is never used.
    """
    assert q.stride(2) == k.stride(2) == 1, "a head's elements must lie side by side"
    if q.is_cuda and q.dtype != torch.float64:
        _launch(q, k, None, positions, rotary)
    elif q.is_cuda or not q.dtype == k.dtype == torch.float32:
        q.copy_(rotate_reference(q, positions, rotary))
        k.copy_(rotate_reference(k, positions, rotary))
    else:
        rotate_cpu(q, k, positions, rotary.inv_freq, rotary.attention_scaling)


def norm_and_rotate(q: Tensor, k: Tensor, norms: HeadNorms, positions: Tensor, rotary: Rotary) -> None:
    """Normalize each head of q and k, then rotate the heads as :func:`rotate` does."""
    assert q.stride(2) == k.stride(2) == 1, "a head's elements must lie side by side"
    if q.is_cuda and q.dtype != torch.float64:
        _launch(q, k, norms, positions, rotary)
    elif q.is_cuda or not q.dtype == k.dtype == norms.q_weight.dtype == torch.float32:
        q.copy_(norm_and_rotate_reference(q, norms.q_weight, norms.eps, positions, rotary))
        k.copy_(norm_and_rotate_reference(k, norms.k_weight, norms.eps, positions, rotary))
    else:
        weights = norms.q_weight, norms.k_weight
        norm_and_rotate_cpu(q, k, *weights, norms.eps, positions, rotary.inv_freq, rotary.attention_scaling)
