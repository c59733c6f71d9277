"""Store the keys and values of a step's tokens in the paged KV cache.

    k_cache[b, :, o] = k[i],  v_cache[b, :, o] = v[i]     for slot_mapping[i] = b * block_size + o

The caches are one layer's views of the KV pool ``[num_blocks, kv_heads, attn_layers, 2, block_size,
head_dim]``: strided in block and head, contiguous inside a (block, head). On CPU, float32 goes to numba and
other dtypes to the reference.
"""

from __future__ import annotations

import torch

from kernels.cpu_jit import as_array, as_flat_array, cpu_jit
from kernels.triton_jit import tl, triton, triton_jit


def store_kv_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """:func:`store_kv` by advanced indexing."""
    block_size = k_cache.shape[2]
    live = slot_mapping >= block_size
    block_ids = slot_mapping[live].div(block_size, rounding_mode="floor")
    offsets = slot_mapping[live] % block_size
    k_cache[block_ids, :, offsets] = k[live].to(k_cache.dtype)
    v_cache[block_ids, :, offsets] = v[live].to(v_cache.dtype)


# One program a token, all its KV heads in one [heads, head_dim] tile: a few hundred bytes to a few KB.
# Pure traffic, so one warp for each KB. Programs of padding tokens return before they touch the cache.
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
    tl.store(k_cache_ptr + target, k.to(k_cache_ptr.dtype.element_ty), mask=live)
    tl.store(v_cache_ptr + target, v.to(v_cache_ptr.dtype.element_ty), mask=live)


def _launch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    num_tokens, kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    block_h, block_d = triton.next_power_of_2(kv_heads), triton.next_power_of_2(head_dim)
    _store_kv_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *k_cache.stride()[:3],
        kv_heads,
        head_dim,
        k_cache.shape[2],
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=min(8, max(1, block_h * block_d // 512)),
    )


@cpu_jit
def _store_kv_cpu(
    k, k_strides, v, v_strides, k_cache, v_cache, cache_strides, shape, slot_mapping, begin, end
):
    kv_heads, block_size, head_dim = shape
    for i in range(begin, end):
        slot = slot_mapping[i]
        if slot < block_size:
            continue
        for head in range(kv_heads):
            target = (
                slot // block_size * cache_strides[0]
                + head * cache_strides[1]
                + slot % block_size * cache_strides[2]
            )
            k_source = i * k_strides[0] + head * k_strides[1]
            v_source = i * v_strides[0] + head * v_strides[1]
            k_cache[target : target + head_dim] = k[k_source : k_source + head_dim]
            v_cache[target : target + head_dim] = v[v_source : v_source + head_dim]


_GRAIN_ELEMENTS = 2**18  # a thread's least share: about 100 µs


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write k and v ``[num_tokens, KVH, D]`` into the caches ``[num_blocks, KVH, block_size, D]``.

    slot_mapping ``[num_tokens]`` int64 is ``block_id * block_size + offset``. A value below ``block_size``
    lies in the null block: the token is padding and nothing is written. Values are cast to the caches' dtype.
    """
    assert k_cache.stride() == v_cache.stride(), "k_cache and v_cache must be views of one pool"
    if k.is_cuda:
        _launch(k, v, k_cache, v_cache, slot_mapping)
    elif not k.dtype == v.dtype == k_cache.dtype == torch.float32:
        store_kv_reference(k, v, k_cache, v_cache, slot_mapping)
    elif len(k) > 0:
        _store_kv_cpu.parallel_for(
            len(k),
            1 + _GRAIN_ELEMENTS // (k.shape[1] * k.shape[2]),
            as_flat_array(k),
            k.stride(),
            as_flat_array(v),
            v.stride(),
            as_flat_array(k_cache),
            as_flat_array(v_cache),
            k_cache.stride(),
            tuple(k_cache.shape[1:]),
            as_array(slot_mapping),
        )
