"""Products with experts' weights: against the reference in float64, and the same bits in every batch."""

import pytest
import torch

from kernels.moe.expert_linear import _launch, expert_linear_reference

COUNTS = [[3, 0, 70, 1], [0, 0, 0, 2], [1, 1, 1, 1], [0, 0, 0, 0]]
"""Rows of each expert."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def operands(counts, dtype=torch.float32, num_outputs=70, num_inputs=100):
    """Two more rows than the experts have, of NaN."""
    generator = torch.Generator().manual_seed(sum(counts))
    x = torch.full((sum(counts) + 2, num_inputs), torch.nan)
    x[:-2] = torch.randn(sum(counts), num_inputs, generator=generator)
    weights = torch.randn(len(counts), num_outputs, num_inputs, generator=generator) / num_inputs**0.5
    ends = int32(torch.tensor(counts).cumsum(0).tolist())
    return x.to(DEVICE, dtype), weights.to(DEVICE, dtype), ends


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_equals_float64(counts, dtype):
    x, weights, ends = operands(counts, dtype)
    y = _launch(x, weights, ends)[: sum(counts)]
    expected = expert_linear_reference(x.double(), weights.double(), ends)[: sum(counts)]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_has_the_same_bits_however_many_rows_its_expert_and_the_others_have(dtype):
    counts = COUNTS[0]
    x, weights, ends = operands(counts, dtype)
    together = _launch(x, weights, ends)
    starts = [sum(counts[:expert]) for expert in range(len(counts))]
    for row in (0, 2, 3, 40, 72, 73):
        expert = max(e for e, start in enumerate(starts) if start <= row and counts[e] > 0)
        alone = int32([0] * expert + [1] * (len(counts) - expert))
        own = _launch(x[row : row + 1], weights, alone)
        assert torch.equal(own[0], together[row])
