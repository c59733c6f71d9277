"""Causal attention of prefill rows over the paged KV cache.

    out[i] = softmax(scale * q[i] K[: p + 1]^T) V[: p + 1],   p = seq_len - query_len + i

Rows are ragged: row s has the queries ``cu_seqlens[s] : cu_seqlens[s + 1]``, which are the last ones of its
``seq_lens[s]`` tokens. The tokens before them are a cached prefix or earlier chunks. K and V of token t are
in block ``block_table[s, t // block_size]``. There are S rows, QH query heads and KVH KV heads, of D elements
each. Query head h uses KV head ``h // (QH // KVH)``.

A cache may be of float8_e4m3fn. Then its values are multiplied by k_scale and v_scale to get K and V. The
factor ``scale`` and the last division include these scales; sums stay in float32.

| device | float32 | bfloat16, float16 | float64 |
|---|---|---|---|
| CUDA | Triton, IEEE products | Triton, float32 sums | reference |
| CPU | numba (paged_attention_prefill_cpu.py) | bfloat16 as float32, float16 by the reference | reference |
"""

from __future__ import annotations

import functools

import torch

from kernels.attention.kv_cache import CPU_DTYPES
from kernels.attention.paged_attention_prefill_cpu import paged_attention_prefill_cpu
from kernels.formats.float8 import readable, widen
from kernels.gpu.tiles import TileRequest, choose
from kernels.gpu.triton_jit import tl, triton, triton_jit


def paged_attention_prefill_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Reference of :func:`paged_attention_prefill`: one row after the other, all scores of a row at once."""
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
        # [blocks, KVH, block_size, D] -> [QH, tokens, D], cut at the row's length: data after it may be NaN.
        k, v = (
            cache[block_ids]
            .transpose(0, 1)
            .reshape(kv_heads, -1, head_dim)[:, :seq_len]
            .to(acc)
            .repeat_interleave(heads_per_kv, dim=0)
            for cache in (k_cache, v_cache)
        )
        scores = scale * k_scale * q[start:end].to(acc).transpose(0, 1) @ k.transpose(1, 2)
        query_positions = torch.arange(seq_len - (end - start), seq_len, device=q.device)
        future = torch.arange(seq_len, device=q.device) > query_positions[:, None]
        attended = scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ v
        out[start:end] = v_scale * attended.transpose(0, 1)
    return out


# One program per tile of BLOCK_M queries: consecutive tokens of a row times the query heads of one KV head,
# so that each loaded K and V element serves all of them (GQA packing). The loop goes through the row's tokens
# BLOCK_N at a time and finds them with the block table. The softmax is computed online. Only tokens from the
# diagonal on are masked.
#
# Tiles begin at multiples of TOKENS, counted from the sequence's first token. So the same part of a query's
# tokens is masked, wherever its prompt was cut into chunks. The compiler may round masked and unmasked scores
# differently: it can fuse a product with the difference that follows only where no mask is between them.
@triton_jit
def _prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    out_ptr,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    cache_block_stride,
    cache_head_stride,
    cache_token_stride,
    table_stride,
    scale_log2,
    v_scale,
    HEADS_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    TOKENS: tl.constexpr = BLOCK_M // HEADS_PER_KV
    row = tl.program_id(2)
    kv_head = tl.program_id(1).to(tl.int64)
    row_start = tl.load(cu_seqlens_ptr + row)
    query_len = tl.load(cu_seqlens_ptr + row + 1) - row_start
    seq_len = tl.load(seq_lens_ptr + row)
    # The last tiles of a row see the most tokens: they are launched first, so that the grid has no long tail.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    first_token = tile * TOKENS - tl.maximum(seq_len - query_len, 0) % TOKENS  # may be below 0
    if (first_token >= query_len) | (query_len == 0):
        return

    lanes = tl.arange(0, BLOCK_M)
    tokens = first_token + lanes // HEADS_PER_KV
    heads = kv_head * HEADS_PER_KV + lanes % HEADS_PER_KV
    dims = tl.arange(0, BLOCK_D)
    # Tokens from 0 to query_len - 1, in one comparison: with two, registers spill in float32.
    live = (lanes < TOKENS * HEADS_PER_KV) & (tokens.to(tl.uint32) < query_len.to(tl.uint32))
    live_dims = live[:, None] & (dims < HEAD_DIM)[None, :]
    rows = (row_start + tokens).to(tl.int64)
    out_offsets = rows * out_token_stride + heads * out_head_stride
    out_tile = out_ptr + out_offsets[:, None] + dims[None, :]
    if seq_len == 0:  # padding
        tl.store(out_tile, tl.zeros([BLOCK_M, BLOCK_D], out_ptr.dtype.element_ty), mask=live_dims)
        return
    q_offsets = rows * q_token_stride + heads * q_head_stride
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=live_dims, other=0.0)

    first_limit = seq_len - query_len + first_token + 1
    limits = tl.where(live, seq_len - query_len + tokens + 1, 0)
    unmasked_end = first_limit // BLOCK_N * BLOCK_N
    end = tl.minimum(first_limit + TOKENS - 1, seq_len)
    k_head_ptr = k_cache_ptr + kv_head * cache_head_stride
    v_head_ptr = v_cache_ptr + kv_head * cache_head_stride
    table_ptr = block_table_ptr + row.to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc, highest, total = attend_tokens(
        acc, highest, total, q, limits, 0, unmasked_end,
        k_head_ptr, v_head_ptr, cache_block_stride, cache_token_stride, table_ptr, scale_log2,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, PRECISION, MASKED=False,
    )  # fmt: skip
    acc, highest, total = attend_tokens(
        acc, highest, total, q, limits, unmasked_end, end,
        k_head_ptr, v_head_ptr, cache_block_stride, cache_token_stride, table_ptr, scale_log2,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, PRECISION, MASKED=True,
    )  # fmt: skip
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None] * v_scale
    tl.store(out_tile, out.to(q.dtype), mask=live_dims)


@triton_jit
def attend_tokens(
    acc,
    highest,
    total,
    q,
    limits,
    first,
    end,
    k_head_ptr,
    v_head_ptr,
    cache_block_stride,
    cache_token_stride,
    table_ptr,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend from BLOCK_M queries to one KV head's tokens ``first : end``; query i sees ``limits[i]`` tokens.

    Without MASKED, all queries must see all tokens, and the number of tokens must be a multiple of BLOCK_N.
    With MASKED, tokens from ``end`` on are neither looked up nor loaded. Zeros replace them, so that 0 * NaN
    can't occur.

    Each round also loads the block ids of the next round. If a round used block ids that it loads itself,
    Triton would give K and V only one buffer each, and no load would be in flight during the products.
    """
    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_N)
    block_ids = tl.load(table_ptr + (first + columns) // BLOCK_SIZE, mask=first + columns < end, other=0)
    for start in range(first, end, BLOCK_N):
        tokens = start + columns
        live = tokens < end if MASKED else tokens >= 0
        offsets = block_ids.to(tl.int64) * cache_block_stride + (tokens % BLOCK_SIZE) * cache_token_stride
        following = tokens + BLOCK_N
        block_ids = tl.load(table_ptr + following // BLOCK_SIZE, mask=following < end, other=0)
        mask = live[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_head_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
        k = widen(k, q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        if MASKED:
            scores = tl.where(tokens[None, :] < limits[:, None], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # avoids -inf + inf before any token
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(highest - shift)
        v = tl.load(v_head_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
        v = widen(v, q.dtype)
        acc = acc * rescale[:, None] + tl.dot(weights.to(q.dtype), v, input_precision=PRECISION)
        total = total * rescale + tl.sum(weights, axis=1)
        highest = new_highest
    return acc, highest, total


LOG2_E = 1.4426950408889634


def dot_precision(dtype: torch.dtype) -> str:
    """Return Triton's mode for products. TF32 would cut only float32, to 10 mantissa bits."""
    return "ieee" if dtype == torch.float32 else "tf32"


@functools.cache
def tile_request(dtype: torch.dtype, heads_per_kv: int, head_dim: int, block_size: int) -> TileRequest:
    """Request smaller tiles for float32, since its elements have twice the bytes, and since its products run
    on FMA units instead of tensor cores.
    """
    exact, wide = dtype == torch.float32, head_dim > 128
    tiles = {
        "BLOCK_M": max(32 if exact else 64 if wide else 128, triton.next_power_of_2(heads_per_kv)),
        "BLOCK_N": 32 if exact or wide else 64,
        "num_warps": (16 if exact else 4) if wide else 8,
        "num_stages": 1 if exact else 2 if wide else 3,
    }
    return TileRequest.of(
        "paged_attention_prefill",
        tiles,
        dtype=dtype,
        heads_per_kv=heads_per_kv,
        head_dim=head_dim,
        block_size=block_size,
    )


def _launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_query_len: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    num_heads, head_dim = q.shape[1:]
    _, kv_heads, block_size, _ = k_cache.shape
    heads_per_kv = num_heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tiles = choose(tile_request(q.dtype, heads_per_kv, head_dim, block_size), q.device)
    if max_query_len * len(seq_lens) == 0:
        return out
    tile_tokens = tiles["BLOCK_M"] // heads_per_kv
    num_tiles = triton.cdiv(max_query_len + tile_tokens - 1, tile_tokens)
    _prefill_kernel[(num_tiles, kv_heads, len(seq_lens))](
        q,
        readable(k_cache),
        readable(v_cache),
        block_table,
        cu_seqlens,
        seq_lens,
        out,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        *k_cache.stride()[:3],
        block_table.stride(0),
        scale * k_scale * LOG2_E,
        v_scale,
        HEADS_PER_KV=heads_per_kv,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        PRECISION=dot_precision(q.dtype),
        **tiles,
    )
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
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Attend from q ``[num_tokens, QH, D]`` to the content of caches ``[num_blocks, KVH, block_size, D]``.

    block_table ``[S, cols]``, cu_seqlens ``[S + 1]`` and seq_lens ``[S]`` are int32. seq_lens counts cached
    prefix and new tokens, whose K and V are already stored. No kernel follows block table entries after a
    row's last block, and K and V after its last token may be NaN. A row of length 0 is padding. max_query_len
    determines the launch grid; max_seq_len is an upper bound of seq_lens. Every token belongs to a row.
    Returns ``[num_tokens, QH, D]``, zero in padding rows.
    """
    assert k_cache.stride() == v_cache.stride(), "k_cache and v_cache must be views of one pool"
    operands = (q, k_cache, v_cache, block_table, cu_seqlens, seq_lens)
    if q.is_cuda and q.dtype != torch.float64:
        return _launch(*operands, scale, max_query_len, k_scale, v_scale)
    if not q.is_cuda and {q.dtype, k_cache.dtype} <= CPU_DTYPES:
        return paged_attention_prefill_cpu(q.float(), *operands[1:], scale * k_scale, v_scale).to(q.dtype)
    return paged_attention_prefill_reference(*operands, scale=scale, k_scale=k_scale, v_scale=v_scale)
