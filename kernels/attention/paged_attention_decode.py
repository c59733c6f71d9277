"""Attention of decode rows over the paged KV cache. With k drafts, a row has ``T = 1 + k`` positions.

    out[r, i] = softmax(scale * q[r, i] K[:n]^T) V[:n],   n = seq_lens[r] - T + i + 1

K and V of token t of row r are in block ``block_table[r, t // block_size]``. There are R rows, QH query heads
and KVH KV heads, of D elements each. Query head h uses KV head ``h // (QH // KVH)``. Devices and dtypes are
as in paged_attention_prefill.py.
"""

from __future__ import annotations

import functools
import math

import torch

from kernels.attention.kv_cache import CPU_DTYPES
from kernels.attention.paged_attention_decode_cpu import paged_attention_decode_cpu
from kernels.attention.paged_attention_prefill import (
    LOG2_E,
    attend_tokens,
    dot_precision,
    paged_attention_prefill_reference,
)
from kernels.formats.float8 import readable
from kernels.gpu.tiles import TileRequest, choose
from kernels.gpu.triton_jit import tl, triton, triton_jit


def paged_attention_decode_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Reference of :func:`paged_attention_decode`: a decode row is a prefill row of T queries."""
    num_rows, num_positions = q.shape[:2]
    cu_seqlens = torch.arange(0, (num_rows + 1) * num_positions, num_positions)
    return paged_attention_prefill_reference(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        block_table,
        cu_seqlens,
        seq_lens,
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
    ).view(q.shape)


MAX_SPLITS = 128
FIXED_SPLIT_TOKENS = 1024
"""Tokens of a split if splits may not depend on the batch. Sums of splits take ``4 * D`` bytes for each
position, head and split: 0.5 GiB for 64 rows of 4 positions and 128k tokens with 32 heads of 128."""
_FIXED_LANES = 16
"""Lanes of a program if they may not depend on T: the rows of one tensor core instruction."""


# One program per (row, KV head, POSITIONS of its T positions, split). These positions times the query heads
# of the KV head make one BLOCK_M tile, so that K and V are read once for all of them. A row's tokens are
# divided evenly among its splits at any length, in shares of at least MIN_SPLIT tokens; splits without a
# share return at once. The grid depends only on maxima that the host knows, so one captured graph serves
# every length. The number of splits is not a constant of the kernel, so graphs of all batch sizes share two
# compiled programs: one for a single split, one for several splits.
#
# POSITIONS is T, unless the launch is batch-invariant: then it is what _FIXED_LANES hold, whatever T is. And
# there are so many splits that none has more than MIN_SPLIT tokens. So split i begins at token i * MIN_SPLIT
# in every batch and at every length.
@triton_jit
def _decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    seq_lens_ptr,
    partial_ptr,
    lse_ptr,
    q_row_stride,
    q_position_stride,
    q_head_stride,
    cache_block_stride,
    cache_head_stride,
    cache_token_stride,
    table_stride,
    scale_log2,
    v_scale,
    num_splits,
    NUM_POSITIONS: tl.constexpr,
    POSITIONS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCKS: tl.constexpr = (NUM_POSITIONS + POSITIONS - 1) // POSITIONS
    row = tl.program_id(0).to(tl.int64)
    kv_head = (tl.program_id(1) // BLOCKS).to(tl.int64)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + row)
    split_len = _split_len(seq_len, num_splits, MIN_SPLIT)
    first = split * split_len
    if (first >= seq_len) & (split > 0):
        return  # split 0 continues: it writes the zeros of a padding row

    lanes = tl.arange(0, BLOCK_M)
    positions = tl.program_id(1) % BLOCKS * POSITIONS + lanes // HEADS_PER_KV
    heads = kv_head * HEADS_PER_KV + lanes % HEADS_PER_KV
    dims = tl.arange(0, BLOCK_D)
    live = (lanes < POSITIONS * HEADS_PER_KV) & (positions < NUM_POSITIONS)
    live_dims = live[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = row * q_row_stride + positions * q_position_stride + heads * q_head_stride
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=live_dims, other=0.0)
    limits = tl.where(live, seq_len - NUM_POSITIONS + positions + 1, 0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc, highest, total = attend_tokens(
        acc, highest, total, q, limits, first, tl.minimum(first + split_len, seq_len),
        k_cache_ptr + kv_head * cache_head_stride, v_cache_ptr + kv_head * cache_head_stride,
        cache_block_stride, cache_token_stride, block_table_ptr + row * table_stride, scale_log2,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, PRECISION, MASKED=True,
    )  # fmt: skip
    safe_total = tl.where(total == 0.0, 1.0, total)
    targets = ((row * NUM_POSITIONS + positions) * NUM_HEADS + heads) * num_splits + split
    partial = (acc / safe_total[:, None] * v_scale).to(partial_ptr.dtype.element_ty)
    tl.store(partial_ptr + targets[:, None] * HEAD_DIM + dims[None, :], partial, mask=live_dims)
    if IS_SPLIT:
        lse = tl.where(total == 0.0, float("-inf"), highest + tl.log2(safe_total))
        tl.store(lse_ptr + targets, lse, mask=live)


# One program per (row, position, head): sums the splits' outputs, weighted by their share of the softmax sum.
# It goes through BLOCK_SPLITS splits at a time. Splits without tokens add zeros, so that the number of splits
# does not affect the result.
@triton_jit
def _merge_splits_kernel(
    partial_ptr,
    lse_ptr,
    seq_lens_ptr,
    out_ptr,
    queries_per_row,
    num_splits,
    HEAD_DIM: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + query // queries_per_row)
    split_len = _split_len(seq_len, num_splits, MIN_SPLIT)
    live_splits = tl.minimum(tl.cdiv(seq_len, split_len), num_splits)  # other splits wrote nothing
    dims = tl.arange(0, BLOCK_D)
    live_dims = dims < HEAD_DIM
    highest = tl.full([BLOCK_SPLITS], float("-inf"), tl.float32)
    for first in range(0, live_splits, BLOCK_SPLITS):
        splits = first + tl.arange(0, BLOCK_SPLITS)
        lse = tl.load(lse_ptr + query * num_splits + splits, mask=splits < live_splits, other=float("-inf"))
        highest = tl.maximum(highest, lse)
    shift = tl.max(highest, axis=0)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    total = tl.zeros([BLOCK_SPLITS], tl.float32)
    out = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, live_splits, BLOCK_SPLITS):
        splits = first + tl.arange(0, BLOCK_SPLITS)
        live = splits < live_splits
        lse = tl.load(lse_ptr + query * num_splits + splits, mask=live, other=float("-inf"))
        weights = tl.exp2(lse - shift)
        total += weights
        offsets = (query * num_splits + splits)[:, None] * HEAD_DIM + dims[None, :]
        partial = tl.load(partial_ptr + offsets, mask=live[:, None] & live_dims[None, :], other=0.0)
        out += tl.sum(partial * weights[:, None], axis=0)
    weight = tl.sum(total, axis=0)
    out = out / tl.where(weight == 0.0, 1.0, weight)
    tl.store(out_ptr + query * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=live_dims)


@triton_jit
def _split_len(seq_len, num_splits, MIN_SPLIT: tl.constexpr):
    """Return how many of a row's tokens a split takes: an even share, rounded up to MIN_SPLIT / 4 tokens."""
    ROUND: tl.constexpr = MIN_SPLIT // 4
    return tl.maximum(tl.cdiv(tl.cdiv(seq_len, num_splits), ROUND) * ROUND, MIN_SPLIT)


def choose_num_splits(num_programs: int, max_seq_len: int, num_places: int, min_split: int) -> int:
    """Return the number of splits of a row. No split is shorter than ``min_split`` at max_seq_len.

    ``num_places`` programs run at once, as one wave. A last wave that fills few of these places takes as long
    as a full wave. So the result is the smallest number of splits that fills its waves at least 9 tenths as
    well as the best number does.
    """
    most = max(1, min(-(-max_seq_len // min_split), MAX_SPLITS))
    waves = [num_programs * splits / num_places for splits in range(1, most + 1)]
    full = [wave / math.ceil(wave) for wave in waves]
    return next(i for i, share in enumerate(full, start=1) if share >= 0.9 * max(full))


@functools.cache
def tile_request(
    dtype: torch.dtype, heads_per_kv: int, head_dim: int, block_size: int, positions: int
) -> TileRequest:
    """Request tiles with which a bfloat16 program holds 72 KiB of K and V, half of them still being loaded.

    An SM gets 2 programs and has room for 3.
    """
    exact = dtype == torch.float32
    wide = exact or head_dim > 128
    tiles = {
        "BLOCK_N": 32 if wide else 64,
        "PROGRAMS_PER_SM": 2,
        "num_warps": (16 if head_dim > 128 else 8) if exact else 4,
        "num_stages": 2 if wide else 3,
    }
    return TileRequest.of(
        "paged_attention_decode",
        tiles,
        dtype=dtype,
        heads_per_kv=heads_per_kv,
        head_dim=head_dim,
        block_size=block_size,
        positions=positions,
    )


def _launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_seq_len: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    num_splits: int | None = None,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    num_rows, num_positions, num_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    heads_per_kv = num_heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    positions = max(1, _FIXED_LANES // heads_per_kv) if batch_invariant else num_positions
    request = tile_request(q.dtype, heads_per_kv, head_dim, block_size, positions)
    tiles = dict(choose(request, q.device))
    programs_per_sm, min_split = tiles.pop("PROGRAMS_PER_SM"), 4 * tiles["BLOCK_N"]
    if batch_invariant:
        min_split = FIXED_SPLIT_TOKENS
        num_splits = triton.cdiv(max_seq_len, min_split)
    elif num_splits is None:
        num_places = programs_per_sm * torch.cuda.get_device_properties(q.device).multi_processor_count
        num_splits = choose_num_splits(num_rows * kv_heads, max_seq_len, num_places, min_split)
    if num_splits == 1:
        partial, lse = out, out  # lse is not touched
    else:
        shape = (num_rows, num_positions, num_heads, num_splits)
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    blocks = triton.cdiv(num_positions, positions)
    _decode_kernel[(num_rows, kv_heads * blocks, num_splits)](
        q,
        readable(k_cache),
        readable(v_cache),
        block_table,
        seq_lens,
        partial,
        lse,
        *q.stride()[:3],
        *k_cache.stride()[:3],
        block_table.stride(0),
        scale * k_scale * LOG2_E,
        v_scale,
        num_splits,
        NUM_POSITIONS=num_positions,
        POSITIONS=positions,
        NUM_HEADS=num_heads,
        HEADS_PER_KV=heads_per_kv,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        IS_SPLIT=num_splits > 1,
        MIN_SPLIT=min_split,
        BLOCK_M=max(16, triton.next_power_of_2(positions * heads_per_kv)),
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        PRECISION=dot_precision(q.dtype),
        **tiles,
    )
    if num_splits > 1:
        _launch_merge(partial, lse, seq_lens, out, min_split)
    return out


_MERGED_SPLITS = 32


def _launch_merge(
    partial: torch.Tensor, lse: torch.Tensor, seq_lens: torch.Tensor, out: torch.Tensor, min_split: int
) -> None:
    """Merge the splits' outputs ``[R, T, QH, splits, D]`` by their log-sums into out ``[R, T, QH, D]``."""
    num_rows, num_positions, num_heads, num_splits, head_dim = partial.shape
    _merge_splits_kernel[(num_rows * num_positions * num_heads,)](
        partial,
        lse,
        seq_lens,
        out,
        num_positions * num_heads,
        num_splits,
        HEAD_DIM=head_dim,
        MIN_SPLIT=min_split,
        BLOCK_SPLITS=_MERGED_SPLITS,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_warps=4,
    )


def paged_attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    max_seq_len: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Attend from q ``[R, T, QH, D]`` to the content of the caches ``[num_blocks, KVH, block_size, D]``.

    block_table ``[R, cols]`` and seq_lens ``[R]`` are int32. seq_lens includes the T new positions, whose K
    and V are already stored; 0 marks a padding row, whose output is zero. No kernel follows block table
    entries after a row's last block, which are stale. K and V after a row's last token may be NaN.
    max_seq_len determines the launch grid and must be at least the longest row's length. With
    ``batch_invariant`` a position's result has the same bits in every batch and for every T; on a CPU it
    always has. Returns ``[R, T, QH, D]``.
    """
    assert k_cache.stride() == v_cache.stride(), "k_cache and v_cache must be views of one pool"
    operands = (q, k_cache, v_cache, block_table, seq_lens)
    if q.is_cuda and q.dtype != torch.float64:
        return _launch(*operands, scale, max_seq_len, k_scale, v_scale, batch_invariant=batch_invariant)
    if not q.is_cuda and q.dtype in CPU_DTYPES and k_cache.dtype in CPU_DTYPES:
        out = paged_attention_decode_cpu(q.float(), *operands[1:], scale * k_scale, v_scale)
        return out if q.dtype == torch.float32 else out.to(q.dtype)
    return paged_attention_decode_reference(*operands, scale=scale, k_scale=k_scale, v_scale=v_scale)
