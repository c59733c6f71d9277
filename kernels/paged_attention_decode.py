"""Attention of decode rows, ``T = 1 + k`` positions each, over the paged KV cache.

    out[r, i] = softmax(scale * q[r, i] K[:n]^T) V[:n],   n = seq_lens[r] - T + i + 1

K and V of token t of row r lie in block ``block_table[r, t // block_size]``. Query head h uses KV head
``h // (QH // KVH)``.
"""

from __future__ import annotations

import torch

from kernels.paged_attention_prefill import paged_attention_prefill_reference


def paged_attention_decode_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """:func:`paged_attention_decode`: a decode row is a prefill row of T queries."""
    num_rows, num_positions = q.shape[:2]
    cu_seqlens = torch.arange(0, (num_rows + 1) * num_positions, num_positions)
    return paged_attention_prefill_reference(
        q.flatten(0, 1), k_cache, v_cache, block_table, cu_seqlens, seq_lens, scale=scale
    ).view(q.shape)


def paged_attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    max_seq_len: int,
) -> torch.Tensor:
    """Attend from q ``[R, T, QH, D]`` to what the caches ``[num_blocks, KVH, block_size, D]`` hold.

    block_table ``[R, cols]`` and seq_lens ``[R]`` are int32; seq_lens counts the T new positions, whose K
    and V are stored already; 0 marks a padding row, whose output is zero. Block table entries beyond a
    row's length are stale and never followed; K and V beyond it inside its last block may be NaN.
    max_seq_len, at least the longest row, fixes the launch grid. Returns ``[R, T, QH, D]``.
    """
    return paged_attention_decode_reference(q, k_cache, v_cache, block_table, seq_lens, scale=scale)
