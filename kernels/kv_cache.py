"""Store the keys and values of a step's tokens in the paged KV cache.

    k_cache[b, :, o] = k[i],  v_cache[b, :, o] = v[i]     for slot_mapping[i] = b * block_size + o

The caches are one layer's views of the KV pool ``[num_blocks, kv_heads, attn_layers, 2, block_size,
head_dim]``: strided in block and head, contiguous inside a (block, head).
"""

from __future__ import annotations

import torch


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


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write k and v ``[num_tokens, KVH, D]`` into the caches ``[num_blocks, KVH, block_size, D]``.

    slot_mapping ``[num_tokens]`` int64 is ``block_id * block_size + offset``. A value below ``block_size``
    lies in the null block: the token is padding and nothing is written.
    """
    store_kv_reference(k, v, k_cache, v_cache, slot_mapping)
