import pytest
import torch

from kernels.attention import kv_cache as module
from kernels.attention.kv_cache import store_kv, store_kv_reference


def store(target, *operands):
    return module._launch(*operands) if target.name == "triton" else store_kv(*operands)


def views(pool, layer):
    return pool[:, :, layer, 0], pool[:, :, layer, 1]


def bits(tensor):
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("num_tokens", "kv_heads", "block_size", "head_dim", "dtype", "cache_dtype"),
    [
        (1, 2, 16, 64, torch.float32, torch.float32),
        (33, 1, 4, 80, torch.float32, torch.float32),
        (9, 4, 4, 96, torch.float32, torch.float32),  # kv_heads == block_size
        (5, 3, 1, 16, torch.float32, torch.float32),  # blocks of one token
        (20, 2, 32, 64, torch.bfloat16, torch.bfloat16),
        (20, 2, 32, 64, torch.float32, torch.float16),  # cast
        (12, 2, 16, 32, torch.float64, torch.float64),
    ],
)
def test_stores_its_tokens_and_nothing_else(
    target, num_tokens, kv_heads, block_size, head_dim, dtype, cache_dtype
):
    num_blocks = 2 + num_tokens // block_size * 2
    projection = torch.randn(num_tokens, 2 * kv_heads + 1, head_dim).to(dtype).to(target.device)
    k, v = projection[:, :kv_heads], projection[:, kv_heads : 2 * kv_heads]  # strided in the token
    slots = torch.randperm((num_blocks - 1) * block_size)[:num_tokens] + block_size
    slots[::4] = torch.arange(len(slots[::4])) % block_size  # padding: inside the null block
    slots = slots.to(target.device)

    pool = torch.full((num_blocks, kv_heads, 3, 2, block_size, head_dim), torch.nan, dtype=cache_dtype)
    pool = pool.to(target.device)
    expected = pool.clone()
    store(target, k, v, *views(pool, 1), slots)
    for i, slot in enumerate(slots.tolist()):
        if slot >= block_size:
            expected[slot // block_size, :, 1, 0, slot % block_size] = k[i].to(cache_dtype)
            expected[slot // block_size, :, 1, 1, slot % block_size] = v[i].to(cache_dtype)
    assert torch.equal(bits(pool), bits(expected))  # NaN included: the null block and other layers


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 24), (torch.bfloat16, 16)])
def test_an_e4m3_pool_gets_scaled_values_rounded_and_nothing_else(target, dtype, head_dim):
    k, v = (50 * torch.randn(2, 9, 2, head_dim)).clamp(-170, 170).to(dtype)  # 0.4 x 448 is the largest
    k[3, 1, 5], v[4, 0, 2], v[5, 1, 0] = torch.nan, torch.inf, 3e5
    pool = torch.full((4, 2, 3, 2, 4, head_dim), torch.nan, dtype=torch.float8_e4m3fn)
    expected = pool.clone()
    slots = torch.tensor([7, 5, 3, 12, 14, 4, 15, 0, 8])
    pool = pool.to(target.device)
    scales = {"k_scale": 0.4, "v_scale": 0.7}
    operands = (k.to(target.device), v.to(target.device), *views(pool, 1), slots.to(target.device))
    if target.name == "triton":
        module._launch(*operands, **scales)
    else:
        store_kv(*operands, **scales)
    store_kv_reference(k, v, *views(expected, 1), slots, **scales)
    assert torch.equal(bits(pool), bits(expected))
    found = pool[slots // 4, :, 1, :, slots % 4].float().cpu()  # [tokens, heads, 2, head_dim]
    assert found[3, 1, 0, 5].isnan()  # an overflow stays visible
    assert found[4, 0, 1, 2].isnan()
    assert found[5, 1, 1, 0] == 448
    is_live = k[3].isfinite()
    torch.testing.assert_close(
        0.4 * found[3, :, 0][is_live], k[3].float()[is_live], rtol=0.07, atol=0.4 * 2.0**-10
    )


def test_pool_of_two_blocks(target):
    k, v = torch.randn(2, 3, 2, 16, device=target.device)
    pool = torch.full((2, 2, 1, 2, 4, 16), torch.nan, device=target.device)
    store(target, k, v, *views(pool, 0), torch.tensor([4, 6, 1], device=target.device))
    assert torch.equal(pool[1, :, 0, 0, 0], k[0])
    assert torch.equal(pool[1, :, 0, 1, 2], v[1])
    assert pool[0].isnan().all()


def test_padding_alone_and_no_tokens_store_nothing(target):
    pool = torch.full((3, 2, 1, 2, 4, 16), torch.nan, device=target.device)
    for slots in ([0, 3, 0], []):
        k = v = torch.zeros(len(slots), 2, 16, device=target.device)
        store(target, k, v, *views(pool, 0), torch.tensor(slots, dtype=torch.int64, device=target.device))
    assert pool.isnan().all()


def test_reference_stores_every_head_of_a_token():
    k, v = torch.randn(2, 2, 3, 8)
    pool = torch.zeros(4, 3, 1, 2, 4, 8)
    store_kv_reference(k, v, *views(pool, 0), torch.tensor([13, 2]))
    assert torch.equal(pool[3, :, 0, 0, 1], k[0])
    assert torch.equal(pool[3, :, 0, 1, 1], v[0])
    assert pool.count_nonzero() == k[0].numel() + v[0].numel()
