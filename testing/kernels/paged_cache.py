"""Rows of random keys and values in a KV pool whose other elements are all NaN."""

from __future__ import annotations

import torch

STALE = (2**30, -1, 0)  # what a block table may contain after a row's last block


class PagedCache:
    """One layer's view of a pool ``[num_blocks, kv_heads, attn_layers, 2, block_size, head_dim]``.

    ``seq_lens`` tokens are stored for each row, in blocks in random order; 0 makes a padding row. The null
    block, the other layer, the tails of last blocks and one spare block are NaN. Columns of the block table
    after a row's last block point at the spare block, at the null block and far out of range.
    """

    def __init__(
        self,
        seq_lens: list[int],
        *,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        spare_blocks: int = 1,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        torch.manual_seed(sum(seq_lens) + head_dim)
        blocks = [-(-seq_len // block_size) for seq_len in seq_lens]
        num_blocks = 1 + sum(blocks) + spare_blocks
        ids = (torch.randperm(num_blocks - 1) + 1).tolist()
        self.pool = torch.full((num_blocks, kv_heads, 2, 2, block_size, head_dim), torch.nan, dtype=dtype)
        stale = [*STALE, *ids[sum(blocks) :]]
        columns = max(blocks) + 2
        table = [[stale[(row + i) % len(stale)] for i in range(columns)] for row in range(len(blocks))]
        self.k, self.v = (
            [],
            [],
        )  # of each row, float64 [KVH, tokens, D], as the cache's dtype rounds them, scaled
        for row, (seq_len, count) in enumerate(zip(seq_lens, blocks, strict=True)):
            table[row][:count] = [ids.pop(0) for _ in range(count)]
            for store, index, scale in ((self.k, 0, k_scale), (self.v, 1, v_scale)):
                values = torch.randn(kv_heads, seq_len, head_dim).to(dtype)
                for block in range(count):
                    part = values[:, block * block_size : (block + 1) * block_size]
                    self.pool[table[row][block], :, 1, index, : part.shape[1]] = part
                store.append(scale * values.double())
        self.pool = self.pool.to(device)
        # A slice of a wider table's columns, so that rows are strided.
        self.block_table = torch.tensor(table, dtype=torch.int32, device=device)
        self.block_table = torch.nn.functional.pad(self.block_table, (0, 3), value=-1)[:, :columns]
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)

    @property
    def k_cache(self) -> torch.Tensor:
        return self.pool[:, :, 1, 0]

    @property
    def v_cache(self) -> torch.Tensor:
        return self.pool[:, :, 1, 1]

    def dense_attention(self, row: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """Returns the attention of the row's last tokens, q ``[tokens, QH, D]``, over contiguous K and V in
        float64."""
        k, v = self.k[row], self.v[row]
        heads_per_kv = q.shape[1] // k.shape[0]
        seen = torch.ones(len(q), k.shape[1], dtype=torch.bool).tril(k.shape[1] - len(q))
        out = torch.nn.functional.scaled_dot_product_attention(
            q.cpu().double().transpose(0, 1),
            k.repeat_interleave(heads_per_kv, dim=0),
            v.repeat_interleave(heads_per_kv, dim=0),
            attn_mask=seen,
            scale=scale,
        )
        return out.transpose(0, 1)


TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}


def assert_attends(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts that ``out`` is as close to the float64 ``expected`` as its dtype allows, and has no NaN."""
    torch.testing.assert_close(out.cpu().double(), expected, **TOLERANCE[out.dtype])
