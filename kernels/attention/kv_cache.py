"""Store the keys and values of a step's tokens in the paged KV cache.

    k_cache[b, :, o] = k[i],  v_cache[b, :, o] = v[i]     for slot_mapping[i] = b * block_size + o

A cache of float8_e4m3fn ("e4m3") holds k / k_scale and v / v_scale, rounded as in kernels/formats/float8.py.
The caches are one layer's views of the KV pool
``[num_blocks, kv_heads, attn_layers, 2, block_size, head_dim]``.
They are strided in block and head, and contiguous within one head of one block. KVH is the number of KV
heads, D is head_dim. On CPU, numba handles float32 inputs for caches of float32 or e4m3; the reference
handles all other cases.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.cpu.jit import FlatArray, cpu_jit
from kernels.cpu.vector import lanes, load, load_number, multiply, prefetch, splat, store, store_number
from kernels.formats.float8 import narrow, to_e4m3, writable
from kernels.gpu.triton_jit import tl, triton, triton_jit


def store_kv_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Reference of :func:`store_kv`, by advanced indexing."""
    block_size = k_cache.shape[2]
    live = slot_mapping >= block_size
    block_ids = slot_mapping[live].div(block_size, rounding_mode="floor")
    offsets = slot_mapping[live] % block_size
    for values, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if cache.dtype == torch.float8_e4m3fn:
            cache[block_ids, :, offsets] = to_e4m3(values[live].to(torch.float32) * (1 / scale))
        else:
            cache[block_ids, :, offsets] = values[live].to(cache.dtype)


# One program per token, with all its KV heads in one [heads, head_dim] tile: a few hundred bytes to a few KB.
# A program only moves memory, so it has one warp per KB. Programs of padding tokens touch no cache.
@triton_jit
def _store_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    cache_block_stride,
    cache_head_stride,
    cache_token_stride,
    kv_heads,
    head_dim,
    block_size,
    k_factor,
    v_factor,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot < block_size:
        return
    heads = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    live = (heads < kv_heads) & (dims < head_dim)
    target = (
        (slot // block_size) * cache_block_stride
        + (slot % block_size) * cache_token_stride
        + heads * cache_head_stride
        + dims
    )
    k = tl.load(k_ptr + token * k_token_stride + heads * k_head_stride + dims, mask=live)
    v = tl.load(v_ptr + token * v_token_stride + heads * v_head_stride + dims, mask=live)
    tl.store(k_cache_ptr + target, narrow(k, k_factor, k_cache_ptr.dtype.element_ty), mask=live)
    tl.store(v_cache_ptr + target, narrow(v, v_factor, v_cache_ptr.dtype.element_ty), mask=live)


def _launch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    num_tokens, kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    block_h, block_d = triton.next_power_of_2(kv_heads), triton.next_power_of_2(head_dim)
    _store_kv_kernel[(num_tokens,)](
        k,
        v,
        writable(k_cache),
        writable(v_cache),
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *k_cache.stride()[:3],
        kv_heads,
        head_dim,
        k_cache.shape[2],
        1 / k_scale,
        1 / v_scale,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=min(8, max(1, block_h * block_d // 512)),
    )


_TOKENS_AHEAD = 4
"""Places are scattered, so each is fetched this many tokens before it is written."""


@cpu_jit
def _store_head(source, s, factor, target, t, head_dim):
    """Compute ``target[t:] = factor * source[s:]`` for head_dim elements."""
    whole = head_dim - head_dim % lanes()
    for d in range(0, whole, lanes()):
        store(target, t + d, multiply(load(source, s + d), splat(factor)))
    for d in range(whole, head_dim):
        store_number(target, t + d, load_number(source, s + d) * factor)


@cpu_jit
def _store_kv_cpu(
    k, k_strides, v, v_strides, k_cache, v_cache, cache_strides, shape, slot_mapping, factors, begin, end
):
    kv_heads, block_size, head_dim = shape
    for i in range(begin, end):
        ahead = slot_mapping[min(i + _TOKENS_AHEAD, end - 1)]
        place = ahead // block_size * cache_strides[0] + ahead % block_size * cache_strides[2]
        for _ in range(kv_heads):
            for d in range(0, head_dim, lanes()):
                prefetch(k_cache, place + d)
                prefetch(v_cache, place + d)
            place += cache_strides[1]
        slot = slot_mapping[i]
        if slot < block_size:
            continue
        target = slot // block_size * cache_strides[0] + slot % block_size * cache_strides[2]
        k_source, v_source = i * k_strides[0], i * v_strides[0]
        for _ in range(kv_heads):
            _store_head(k, k_source, factors[0], k_cache, target, head_dim)
            _store_head(v, v_source, factors[1], v_cache, target, head_dim)
            target += cache_strides[1]
            k_source += k_strides[1]
            v_source += v_strides[1]


CPU_CACHE_DTYPES = (torch.float32, torch.float8_e4m3fn)
"""Dtypes of the caches that compiled CPU kernels can write and read; they compute in float32."""
CPU_DTYPES = {*CPU_CACHE_DTYPES, torch.bfloat16}
"""Dtypes of the queries and caches that compiled CPU kernels can read."""
_GRAIN_ELEMENTS = 2**17  # a thread's minimum share: about 100 µs


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write k and v ``[num_tokens, KVH, D]`` into the caches ``[num_blocks, KVH, block_size, D]``.

    slot_mapping ``[num_tokens]`` int64 is ``block_id * block_size + offset``. A value below ``block_size``
    lies in the null block: the token is padding and nothing is written. Values are cast to the caches' dtype.
    Whoever reads an e4m3 cache must multiply its values by the scales; other caches have no scales.
    """
    assert k_cache.stride() == v_cache.stride(), "k_cache and v_cache must be views of one pool"
    if k.is_cuda:
        _launch(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    elif not k.dtype == v.dtype == torch.float32 or k_cache.dtype not in CPU_CACHE_DTYPES:
        store_kv_reference(k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    elif len(k) > 0:
        _store_kv_cpu.parallel_for(
            len(k),
            1 + _GRAIN_ELEMENTS // (k.shape[1] * k.shape[2]),
            FlatArray(k),
            k.stride(),
            FlatArray(v),
            v.stride(),
            FlatArray(k_cache),
            FlatArray(v_cache),
            k_cache.stride(),
            tuple(k_cache.shape[1:]),
            slot_mapping,
            _factors(k_cache.dtype, k_scale, v_scale),
        )


def _factors(dtype: torch.dtype, k_scale: float, v_scale: float) -> tuple[np.float32, np.float32]:
    if dtype == torch.float32:
        return np.float32(1), np.float32(1)
    return np.float32(1 / k_scale), np.float32(1 / v_scale)
