import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import paged_attention_decode as module
from kernels.attention.paged_attention_decode import (
    choose_num_splits,
    paged_attention_decode,
    paged_attention_decode_reference,
)
from testing.kernels.interpreted import skip_bfloat16_in_the_interpreter
from testing.kernels.paged_cache import PagedCache, assert_attends


def decode(target, q, cache, scale, num_splits=1, **scales):
    """``num_splits`` is for the Triton kernel, which has no GPU to fill in a test."""
    max_seq_len = int(cache.seq_lens.max())
    operands = (q, cache.k_cache, cache.v_cache, cache.block_table, cache.seq_lens)
    if target.name == "triton":
        return module._launch(*operands, scale, max_seq_len, num_splits=num_splits, **scales)
    return paged_attention_decode(*operands, scale=scale, max_seq_len=max_seq_len, **scales)


def queries(num_rows, num_positions, num_heads, head_dim, dtype=torch.float32, device="cpu"):
    """Columns of a wider projection: strided in row and position."""
    projection = torch.randn(num_rows * num_positions, num_heads * head_dim + 8).to(dtype).to(device)
    return projection[:, 8:].unflatten(1, (num_heads, head_dim)).unflatten(0, (num_rows, num_positions))


def dense(cache, q, scale):
    lengths = cache.seq_lens.tolist()
    rows = [
        cache.dense_attention(r, q[r], scale) if length else torch.zeros(q.shape[1:], dtype=torch.float64)
        for r, length in enumerate(lengths)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("seq_lens", "num_positions", "num_heads", "kv_heads", "block_size", "head_dim", "dtype"),
    [
        ([1, 15, 16, 17, 0, 33], 1, 4, 2, 16, 32, torch.float32),  # around block edges
        ([7, 0, 64, 65], 2, 6, 2, 4, 80, torch.float32),  # 3 heads a KV head; head_dim no power of 2
        ([4, 31, 0, 40], 4, 8, 1, 32, 96, torch.float32),  # one KV head
        ([3, 5, 70], 3, 4, 4, 4, 16, torch.float32),  # kv_heads == block_size, no grouping
        ([0, 9, 2], 1, 2, 1, 1, 16, torch.float32),  # blocks of one token
        ([0, 0], 2, 4, 2, 16, 32, torch.float32),  # padding alone
        ([0, 9, 37], 2, 16, 2, 16, 256, torch.float32),  # 8 wide heads a KV head
        ([21, 0], 3, 5, 1, 8, 112, torch.float32),
        ([19, 0, 48], 2, 4, 2, 16, 64, torch.bfloat16),
        ([19, 0, 48], 1, 4, 1, 16, 128, torch.float16),
    ],
)
def test_decode_equals_dense_attention(
    target, seq_lens, num_positions, num_heads, kv_heads, block_size, head_dim, dtype
):
    skip_bfloat16_in_the_interpreter(target, dtype)
    cache = PagedCache(
        seq_lens,
        kv_heads=kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        dtype=dtype,
        device=target.device,
    )
    q = queries(len(seq_lens), num_positions, num_heads, head_dim, dtype, target.device)
    out = decode(target, q, cache, scale=head_dim**-0.5)
    assert out.shape == q.shape
    assert_attends(out, dense(cache, q, scale=head_dim**-0.5))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    ("seq_lens", "num_positions", "num_heads", "kv_heads", "block_size", "head_dim"),
    [
        ([1, 15, 16, 17, 0, 133], 1, 4, 2, 16, 32),
        ([4, 31, 0, 70], 4, 8, 1, 32, 96),
        ([7, 64, 65], 2, 6, 2, 4, 41),  # rows of bytes that are not aligned
    ],
)
def test_an_e4m3_cache_decodes_as_dense_attention_to_its_scaled_values(
    target, seq_lens, num_positions, num_heads, kv_heads, block_size, head_dim, num_splits
):
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
    q = queries(len(seq_lens), num_positions, num_heads, head_dim, device=target.device)
    out = decode(target, q, cache, head_dim**-0.5, num_splits, **scales)
    assert_attends(out, dense(cache, q, scale=head_dim**-0.5))


@pytest.mark.parametrize("num_splits", [2, 3])
def test_splits_of_a_row_add_up(target, num_splits):
    cache = PagedCache([1, 128, 129, 0, 300], kv_heads=1, block_size=16, head_dim=16, device=target.device)
    q = queries(5, 1, 2, 16, device=target.device)
    assert_attends(decode(target, q, cache, 0.3, num_splits), dense(cache, q, 0.3))


def test_pool_of_two_blocks(target):
    cache = PagedCache([3], kv_heads=2, block_size=4, head_dim=16, device=target.device, spare_blocks=0)
    assert cache.k_cache.shape[0] == 2
    q = queries(1, 2, 4, 16, device=target.device)
    assert_attends(decode(target, q, cache, 0.25), dense(cache, q, 0.25))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_nan_of_a_live_token_shows_in_the_positions_that_see_it(target, dtype):
    cache = PagedCache([20, 20], kv_heads=1, block_size=16, head_dim=16, dtype=dtype, device=target.device)
    cache.v_cache[cache.block_table[0, 1], :, 3] = torch.nan  # token 19: seen by the last position only
    out = decode(target, queries(2, 2, 2, 16, device=target.device), cache, 0.25)
    assert out[0, 1].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_reference_equals_dense_attention(dtype):
    cache = PagedCache([5, 0, 33], kv_heads=2, block_size=8, head_dim=24, dtype=dtype)
    q = queries(3, 2, 4, 24, dtype)
    out = paged_attention_decode_reference(
        q, cache.k_cache, cache.v_cache, cache.block_table, cache.seq_lens, scale=0.2
    )
    assert_attends(out, dense(cache, q, 0.2))


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=6),
    num_positions=st.integers(1, 4),
    kv_heads=st.sampled_from([1, 2, 3]),
    heads_per_kv=st.sampled_from([1, 2, 5]),
    block_size=st.sampled_from([1, 4, 16, 32, 128]),
    head_dim=st.sampled_from([8, 33, 64]),
)
def test_any_batch_decodes_as_dense_attention_on_cpu(
    lengths, num_positions, kv_heads, heads_per_kv, block_size, head_dim
):
    lengths = [length and max(length, num_positions) for length in lengths]
    cache = PagedCache(lengths, kv_heads=kv_heads, block_size=block_size, head_dim=head_dim)
    q = queries(len(lengths), num_positions, kv_heads * heads_per_kv, head_dim)
    out = paged_attention_decode(
        q, cache.k_cache, cache.v_cache, cache.block_table, cache.seq_lens, scale=0.2, max_seq_len=200
    )
    assert_attends(out, dense(cache, q, 0.2))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_shares_of_several_threads_cover_all_rows(num_threads, monkeypatch):
    monkeypatch.setattr("kernels.attention.paged_attention_decode_cpu._GRAIN_HEADS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    cache = PagedCache([90, 0, 3, 40, 77], kv_heads=1, block_size=16, head_dim=32)
    q = queries(5, 1, 4, 32)
    out = paged_attention_decode(
        q, cache.k_cache, cache.v_cache, cache.block_table, cache.seq_lens, scale=0.2, max_seq_len=90
    )
    assert_attends(out, dense(cache, q, 0.2))


def test_grid_is_split_until_it_fills_the_gpu():
    def num_splits(num_programs, max_seq_len):
        return choose_num_splits(num_programs, max_seq_len, num_places=264, min_split=256)

    assert num_splits(8, 1000) == 4  # no split shorter than 256
    assert num_splits(8, 32768) == 30  # 240 of 264 places
    assert num_splits(512, 32768) == 1  # two waves, full to 97 %
    assert num_splits(272, 32768) > 4  # one more than a wave: whole rows would leave half the GPU idle
    for num_programs in (1, 8, 64, 272, 512, 4096):
        waves = num_programs * num_splits(num_programs, 32768) / 264
        assert waves < 1 or waves / math.ceil(waves) > 0.85


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_one_captured_graph_serves_every_length():
    cache = PagedCache([700, 20, 0, 300], kv_heads=2, block_size=16, head_dim=64, device="cuda")
    q = queries(4, 2, 8, 64, device="cuda")
    operands = (q, cache.k_cache, cache.v_cache, cache.block_table, cache.seq_lens)

    def step():
        return paged_attention_decode(*operands, scale=0.125, max_seq_len=4096)

    lengths = cache.seq_lens.clone()
    cache.seq_lens.fill_(0)  # captured at length 0, replayed at the real ones
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    cache.seq_lens.copy_(lengths)
    graph.replay()
    assert_attends(out, dense(cache, q, 0.125))


def invariant(target, q, cache, rows, max_seq_len):
    """Attends from some rows of q, as a launch that knows ``max_seq_len``."""
    seq_lens, block_table = cache.seq_lens[rows], cache.block_table[rows]
    operands = (q[rows], cache.k_cache, cache.v_cache, block_table, seq_lens)
    if target.name == "triton":
        return module._launch(*operands, 0.2, max_seq_len, batch_invariant=True)
    return paged_attention_decode(*operands, scale=0.2, max_seq_len=max_seq_len, batch_invariant=True)


@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "dtype"),
    [  # lanes for 2, 5, 1 and 5 positions
        (8, 1, torch.float32),
        (6, 2, torch.float16),
        (18, 1, torch.float32),
        (6, 2, torch.float32),  # 3 heads a KV head: a head's place among a row's queries is odd or even
    ],
)
def test_a_position_has_the_same_bits_in_every_batch_and_for_every_number_of_positions(
    target, monkeypatch, num_heads, kv_heads, dtype
):
    if target.name == "cpu" and dtype != torch.float32:
        pytest.skip("the CPU path computes in float32; float16 has the reference")
    monkeypatch.setattr(module, "FIXED_SPLIT_TOKENS", 64)
    torch.manual_seed(num_heads)
    lengths = [7, 0, 133, 129]  # the last row's positions see 127, 128 and 129 tokens
    cache = PagedCache(
        lengths, kv_heads=kv_heads, block_size=16, head_dim=32, dtype=dtype, device=target.device
    )
    q = queries(len(lengths), 3, num_heads, 32, dtype, target.device)
    together = invariant(target, q, cache, slice(0, 4), 4000)
    assert_attends(together, dense(cache, q, 0.2))
    for row, length in enumerate(lengths):
        alone = invariant(target, q, cache, slice(row, row + 1), max(length, 1))
        assert torch.equal(alone[0], together[row])
    for first, count in ((0, 1), (1, 2)):  # the same positions, in steps of other sizes
        end = first + count
        then = SimpleNamespace(
            seq_lens=(cache.seq_lens - 3 + end).clamp(min=0),
            **{name: getattr(cache, name) for name in ("k_cache", "v_cache", "block_table")},
        )
        step = invariant(target, q[:, first:end], then, [0, 2, 3], 133)
        assert torch.equal(step, together[[0, 2, 3], first:end])
