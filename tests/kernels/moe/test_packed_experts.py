"""Experts' products on CPU: grouped rows against each expert's own product, bit for bit."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.packed_linear import PackedLinear
from kernels.moe.packed_experts import GroupedRows, PackedExperts

NUM_EXPERTS, OUTPUTS = 5, 70


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("relu_squared", [False, True], ids=["identity", "relu_squared"])
@pytest.mark.parametrize(
    ("num_tokens", "k", "size"), [(1, 3, 20), (9, 2, 300), (60, 2, 2300)], ids=["few", "parts", "segments"]
)
def test_each_pair_has_the_bits_of_its_expert_alone(num_tokens, k, size, relu_squared, dtype):
    generator = torch.Generator().manual_seed(size)
    weights = (torch.randn(NUM_EXPERTS, OUTPUTS, size, generator=generator) / size**0.5).to(dtype)
    x = torch.randn(num_tokens, size + 1, generator=generator)[:, :size]
    # Half of all pairs go to expert 2. Some go to an expert that this rank does not have.
    ids = torch.randint(NUM_EXPERTS + 1, (num_tokens, k), generator=generator)
    ids[::2] = 2
    grouped = GroupedRows.sort(x, ids, NUM_EXPERTS)
    product = PackedExperts(list(weights))(grouped.rows, grouped.segments, relu_squared=relu_squared)
    alone = [PackedLinear.pack(weight, None) for weight in weights]
    for token in range(num_tokens):
        for j in range(k):
            expert = int(ids[token, j])
            if expert < NUM_EXPERTS:
                expected = alone[expert](x[token, None], relu_squared=relu_squared)[0]
                assert torch.equal(product[grouped.places[token, j]], expected)


def test_no_token_and_no_own_expert_are_no_work():
    experts = PackedExperts(list(torch.randn(NUM_EXPERTS, OUTPUTS, 8)))
    for ids in (torch.empty(0, 2, dtype=torch.int64), torch.full((3, 2), NUM_EXPERTS)):
        grouped = GroupedRows.sort(torch.randn(len(ids), 8), ids, NUM_EXPERTS)
        assert grouped.segments[-1] == 0
        assert experts(grouped.rows, grouped.segments).shape == (ids.numel(), OUTPUTS)
