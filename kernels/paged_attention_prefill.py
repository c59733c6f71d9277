"""Causal attention of prefill rows over the paged KV cache.

    out[i] = softmax(scale * q[i] K[: p + 1]^T) V[: p + 1],   p = seq_len - query_len + i

Rows are ragged: row s owns the queries ``cu_seqlens[s] : cu_seqlens[s + 1]``, which are the last ones of its
``seq_lens[s]`` tokens; what stands before them is a cached prefix or earlier chunks. K and V of token t lie
in block ``block_table[s, t // block_size]``. Query head h uses KV head ``h // (QH // KVH)``.
"""

from __future__ import annotations

import torch


def paged_attention_prefill_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """:func:`paged_attention_prefill`, one row after the other with all its scores at once."""
    acc = torch.promote_types(q.dtype, torch.float32)
    kv_heads, block_size, head_dim = k_cache.shape[1:]
    heads_per_kv = q.shape[1] // kv_heads
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    bounds = cu_seqlens.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = bounds[row], bounds[row + 1]
        if seq_len == 0 or start == end:
            continue
        block_ids = block_table[row, : -(-seq_len // block_size)].long()
        # [blocks, KVH, block_size, D] -> [QH, tokens, D], cut at the length: beyond it may be NaN.
        k, v = (
            cache[block_ids]
            .transpose(0, 1)
            .reshape(kv_heads, -1, head_dim)[:, :seq_len]
            .to(acc)
            .repeat_interleave(heads_per_kv, dim=0)
            for cache in (k_cache, v_cache)
        )
        scores = scale * q[start:end].to(acc).transpose(0, 1) @ k.transpose(1, 2)
        query_positions = torch.arange(seq_len - (end - start), seq_len, device=q.device)
        future = torch.arange(seq_len, device=q.device) > query_positions[:, None]
        out[start:end] = (scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ v).transpose(0, 1)
    return out


def paged_attention_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
) -> torch.Tensor:
    """Attend from q ``[num_tokens, QH, D]`` to what the caches ``[num_blocks, KVH, block_size, D]`` hold.

    block_table ``[S, cols]``, cu_seqlens ``[S + 1]`` and seq_lens ``[S]`` are int32; seq_lens counts cached
    prefix and new tokens, whose K and V are stored already. Block table entries beyond a row's length are
    never followed, and K and V beyond it inside its last block may be NaN. A row of length 0 is padding.
    max_query_len and max_seq_len bound the rows' lengths. Returns ``[num_tokens, QH, D]``, zero where no
    row is.
    """
    return paged_attention_prefill_reference(
        q, k_cache, v_cache, block_table, cu_seqlens, seq_lens, scale=scale
    )
