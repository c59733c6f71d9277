import itertools

import pytest
import torch

from kernels.attention import paged_attention_prefill as module
from kernels.attention.paged_attention_prefill import (
    paged_attention_prefill,
    paged_attention_prefill_reference,
)
from testing.kernels.interpreted import skip_bfloat16_in_the_interpreter
from testing.kernels.paged_cache import PagedCache, assert_attends


def prefill(target, q, cache, query_lens, scale, seq_lens=None, **scales):
    """q ``[num_tokens, QH, D]``, ragged by query_lens, at the ends of rows of seq_lens."""
    cu_seqlens = target.int32([0, *itertools.accumulate(query_lens)])
    seq_lens = cache.seq_lens if seq_lens is None else target.int32(seq_lens)
    operands = (q, cache.k_cache, cache.v_cache, cache.block_table, cu_seqlens, seq_lens)
    if target.name == "triton":
        return module._launch(*operands, scale, max(query_lens), **scales)
    return paged_attention_prefill(
        *operands, scale=scale, max_query_len=max(query_lens), max_seq_len=int(seq_lens.max()), **scales
    )


def queries(num_tokens, num_heads, head_dim, dtype=torch.float32, device="cpu"):
    """Columns of a wider projection."""
    projection = torch.randn(num_tokens, num_heads * head_dim + 16).to(dtype).to(device)
    return projection[:, 16:].unflatten(1, (num_heads, head_dim))


def dense(cache, q, query_lens, scale):
    out = torch.zeros(q.shape, dtype=torch.float64)
    start = 0
    for row, (query_len, seq_len) in enumerate(zip(query_lens, cache.seq_lens.tolist(), strict=True)):
        if query_len and seq_len:
            tokens = slice(start, start + query_len)
            out[tokens] = cache.dense_attention(row, q[tokens], scale)
        start += query_len
    return out


ROWS = [  # (query_len, seq_len) of each row
    [(1, 1), (16, 16), (17, 17), (15, 15)],  # whole prompts around a block's edge
    [(5, 40), (1, 33), (32, 64)],  # chunks behind a prefix
    [(3, 0), (20, 20), (0, 5), (0, 0)],  # padding rows, a row without queries
    [(100, 100), (70, 135)],  # several tiles
]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "block_size", "head_dim", "dtype"),
    [
        (4, 2, 16, 32, torch.float32),
        (6, 2, 4, 80, torch.float32),  # 3 heads a KV head; head_dim no power of 2
        (4, 4, 4, 96, torch.float32),  # kv_heads == block_size
        (8, 1, 32, 16, torch.float32),
        (2, 1, 1, 16, torch.float32),  # blocks of one token
        (8, 1, 16, 256, torch.float32),  # 8 wide heads a KV head
        (5, 1, 8, 112, torch.float32),
        (4, 2, 16, 64, torch.bfloat16),
        (4, 1, 16, 128, torch.float16),
    ],
)
def test_prefill_equals_dense_attention(target, rows, num_heads, kv_heads, block_size, head_dim, dtype):
    query_lens, seq_lens = (list(column) for column in zip(*rows, strict=True))
    skip_bfloat16_in_the_interpreter(target, dtype)
    cache = PagedCache(
        seq_lens,
        kv_heads=kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        dtype=dtype,
        device=target.device,
    )
    q = queries(sum(query_lens), num_heads, head_dim, dtype, target.device)
    out = prefill(target, q, cache, query_lens, scale=head_dim**-0.5)
    assert out.shape == q.shape
    assert_attends(out, dense(cache, q, query_lens, head_dim**-0.5))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "block_size", "head_dim"), [(4, 2, 16, 32), (6, 2, 4, 41), (4, 4, 4, 96)]
)
def test_an_e4m3_cache_is_attended_as_its_scaled_values(
    target, rows, num_heads, kv_heads, block_size, head_dim
):
    query_lens, seq_lens = (list(column) for column in zip(*rows, strict=True))
    scales = {"k_scale": 0.37, "v_scale": 2.5}
    cache = PagedCache(
        seq_lens,
        kv_heads=kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        dtype=torch.float8_e4m3fn,
        device=target.device,
        **scales,
    )
    q = queries(sum(query_lens), num_heads, head_dim, device=target.device)
    out = prefill(target, q, cache, query_lens, head_dim**-0.5, **scales)
    assert_attends(out, dense(cache, q, query_lens, head_dim**-0.5))


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_a_query_has_the_same_bits_wherever_its_prompt_is_cut(target, chunk):
    cache = PagedCache([40], kv_heads=2, block_size=16, head_dim=32, device=target.device)
    q = queries(40, 4, 32, device=target.device)
    out = [
        prefill(target, part, cache, [len(part)], 0.2, seq_lens=[min(40, start + chunk)])
        for start, part in zip(range(0, 40, chunk), q.split(chunk), strict=True)
    ]
    assert torch.equal(torch.cat(out), prefill(target, q, cache, [40], 0.2))


def test_pool_of_two_blocks(target):
    cache = PagedCache([3], kv_heads=2, block_size=4, head_dim=16, device=target.device, spare_blocks=0)
    assert cache.k_cache.shape[0] == 2
    q = queries(3, 4, 16, device=target.device)
    assert_attends(prefill(target, q, cache, [3], 0.25), dense(cache, q, [3], 0.25))


def test_nan_of_a_live_token_shows_in_the_queries_that_see_it(target):
    cache = PagedCache([20, 20], kv_heads=1, block_size=16, head_dim=16, device=target.device)
    cache.k_cache[cache.block_table[0, 1], :, 3] = torch.nan  # token 19
    out = prefill(target, queries(40, 2, 16, device=target.device), cache, [20, 20], 0.25)
    assert out[19].isnan().all()
    assert out[20:].isfinite().all()


@pytest.mark.parametrize("rows", ROWS)
def test_reference_equals_dense_attention_in_float64(rows):
    query_lens, seq_lens = (list(column) for column in zip(*rows, strict=True))
    cache = PagedCache(seq_lens, kv_heads=2, block_size=8, head_dim=24, dtype=torch.float64)
    q = queries(sum(query_lens), 4, 24, torch.float64)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(query_lens)])
    out = paged_attention_prefill_reference(
        q, cache.k_cache, cache.v_cache, cache.block_table, cu_seqlens, cache.seq_lens, scale=0.2
    )
    assert_attends(out, dense(cache, q, query_lens, 0.2))
