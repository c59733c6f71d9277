"""Joined rows against torch.cat."""

import pytest
import torch

from kernels.linear.joined_rows import joined_rows


@pytest.mark.parametrize("shape", [(1,), (5,), (4, 16), (3, 7, 33)])
@pytest.mark.parametrize("num_rows", [(1, 1), (31, 256), (1, 2000), (700, 3)])
def test_rows_follow_each_other(shape, num_rows):
    first, second = (torch.randn(count, *shape) for count in num_rows)
    assert torch.equal(joined_rows(first, second), torch.cat((first, second)))


def test_rows_of_other_dtypes_and_strides_follow_each_other():
    wide = torch.randn(6, 8, dtype=torch.bfloat16)
    for first, second in ((wide[:2], wide[2:]), (wide.float()[:2, :5], wide.float()[2:, :5])):
        assert torch.equal(joined_rows(first, second), torch.cat((first, second)))
