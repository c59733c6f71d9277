"""Rows of a table by index, scaled."""

import pytest
import torch

from kernels.linear.embedding import embedding


@pytest.mark.parametrize("scale", [1.0, 12.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num", [0, 1, 700])
def test_rows_are_the_tables(num, dtype, scale):
    table = torch.randn(50, 1031).to(dtype)
    ids = torch.randint(0, 50, (num,))
    rows = embedding(ids, table, scale=scale)
    assert rows.dtype == dtype
    assert torch.equal(rows, table[ids] * scale)
