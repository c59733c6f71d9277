"""Routing, sorting and combining of a mixture of experts; the whole layer is in tests/engine."""

import pytest
import torch

from kernels.moe import moe_combine as combine_module
from kernels.moe import moe_route as route_module
from kernels.moe import moe_sort as sort_module
from kernels.moe.moe_combine import moe_combine, moe_combine_reference
from kernels.moe.moe_route import Routing, moe_route, moe_route_reference
from kernels.moe.moe_sort import moe_sort, moe_sort_reference

TOLERANCE = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (8e-3, 1e-2), torch.float16: (1e-3, 1e-3)}


def route(target, *args):
    return route_module._launch(*args) if target.name == "triton" else moe_route(*args)


def sort(target, *args):
    return sort_module._launch(*args) if target.name == "triton" else moe_sort(*args)


def combine(target, *args):
    return combine_module._launch(*args) if target.name == "triton" else moe_combine(*args)


def by_id(ids, weights):
    """Ids ascending, weights with them: an op may name a token's experts in any order."""
    ids, order = ids.sort(dim=1)
    return ids.cpu(), weights.gather(1, order).cpu()


@pytest.mark.parametrize(
    ("num_experts", "routing"),
    [
        (8, Routing(2, 1, 1, True, 1.0)),
        (24, Routing(6, 1, 1, True, 2.5)),
        (12, Routing(4, 3, 2, False, 0.5)),
        (20, Routing(3, 5, 2, True, 1.0)),
        (24, Routing(6, 1, 1, True, 2.5, shared_experts=2)),
    ],
)
def test_the_best_experts_of_the_best_groups_are_chosen(target, num_experts, routing):
    torch.manual_seed(num_experts)
    logits, correction = torch.randn(9, num_experts) * 2, torch.randn(num_experts) / 4
    ids, weights = route(target, logits.to(target.device), correction.to(target.device), routing)
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    expected = by_id(*moe_route_reference(logits.double(), correction.double(), routing))
    got = by_id(ids, weights)
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1].double(), expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("num_experts", "k"), [(8, 2), (62, 6), (512, 10)])
def test_softmax_routes_to_the_best_logits(target, num_experts, k, normalize):
    logits = torch.randn(5, num_experts, generator=torch.Generator().manual_seed(k)) * 3
    logits[0, 1], logits[0, 4] = 500.0, 100.0  # the others' shares are all 0, and yet the best are chosen
    routing = Routing(k, 1, 1, normalize, 1.0, "softmax")
    got = by_id(*route(target, logits.to(target.device), None, routing))
    best, ids = logits.double().topk(k, dim=1)
    shares = logits.double().softmax(dim=1).gather(1, ids)
    ids, order = ids.sort(dim=1)
    expected = (best.softmax(dim=1) if normalize else shares).gather(1, order)
    assert torch.equal(got[0], ids)
    assert got[1].dtype == torch.float32
    torch.testing.assert_close(got[1].double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_a_token_that_is_nan_gets_distinct_experts_and_leaves_the_others_alone(target, scoring):
    groups = (4, 2) if scoring == "sigmoid" else (1, 1)
    routing = Routing(3, *groups, True, 1.0, scoring)
    logits = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).to(target.device)
    correction = torch.zeros(16, device=target.device) if scoring == "sigmoid" else None
    expected = by_id(*route(target, logits, correction, routing))
    logits[1] = torch.nan
    ids, weights = by_id(*route(target, logits, correction, routing))
    assert weights[1].isnan().all()
    assert len(set(ids[1].tolist())) == 3
    assert ids.min() >= 0
    assert ids.max() < 16
    for token in (0, 2):
        assert torch.equal(ids[token], expected[0][token])
        assert torch.equal(weights[token], expected[1][token])


def test_equal_scores_are_told_apart(target):
    ids, _ = route(
        target, torch.zeros(2, 8, device=target.device), torch.zeros(8, device=target.device),
        Routing(4, 4, 2, True, 1.0),
    )  # fmt: skip
    assert all(len(set(row)) == 4 for row in ids.tolist())


@pytest.mark.parametrize(("num_tokens", "k", "num_experts"), [(1, 2, 8), (5, 3, 4), (90, 6, 16), (0, 2, 4)])
def test_pairs_are_sorted_by_expert_then_token(target, num_tokens, k, num_experts):
    torch.manual_seed(num_tokens)
    scores = torch.rand(num_tokens, num_experts)
    scores[:, 1] = -1  # an expert without tokens
    expert_ids = scores.topk(k, dim=1).indices.to(target.device)
    results = sort(target, expert_ids, num_experts)
    for got, expected in zip(results, moe_sort_reference(expert_ids, num_experts), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_tokens", "k", "size"), [(1, 2, 16), (5, 3, 40), (3, 6, 1100)])
def test_results_are_weighed_and_added_up(target, num_tokens, k, size, dtype):
    torch.manual_seed(size)
    results = torch.randn(num_tokens * k, size).to(dtype).to(target.device)
    places = torch.randperm(num_tokens * k).view(num_tokens, k).to(target.device)
    weights = torch.rand(num_tokens, k, device=target.device)
    out = combine(target, results, places, weights)
    assert out.dtype == dtype
    rtol, atol = TOLERANCE[dtype]
    expected = moe_combine_reference(results.double(), places, weights.double())
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)


def test_results_in_the_tokens_order_need_no_places(target):
    results = torch.randn(15, 40, generator=torch.Generator().manual_seed(0)).to(target.device)
    weights = torch.rand(5, 3, device=target.device)
    places = torch.arange(15, device=target.device).view(5, 3)
    expected = combine(target, results, places, weights)
    torch.testing.assert_close(combine(target, results, None, weights), expected)
