"""Sums of two tensors, alone and recorded."""

import pytest
import torch

from kernels.cpu.graph import CpuGraph
from kernels.norms.add import add


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 37), (5000, 130)])
def test_sums_are_torchs(shape, dtype):
    x, y = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    assert torch.equal(add(x, y), x + y)


def test_a_recorded_sum_follows_its_operands():
    x, y = torch.ones(2, 5), torch.ones(2, 5)
    graph = CpuGraph()
    with graph.record():
        total = add(x, y)
    x.fill_(3.0)
    graph.replay()
    assert torch.equal(total, torch.full((2, 5), 4.0))
