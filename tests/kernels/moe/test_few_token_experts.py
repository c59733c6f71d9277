"""Experts' products for a few tokens, and the router's: against the references in float64."""

import pytest
import torch

from kernels.moe import few_token_experts, router_logits
from kernels.moe.few_token_experts import few_token_down_reference, few_token_up_reference
from kernels.moe.router_logits import router_logits_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_EXPERTS, PER_TOKEN, CHANNELS, HIDDEN = 9, 3, 70, 100


def random(*shape, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) / 4).to(DEVICE, dtype)


def ids_of(num_tokens):
    """The last expert has no token, and the first expert all of them."""
    generator = torch.Generator().manual_seed(num_tokens)
    rows = [
        1 + torch.randperm(NUM_EXPERTS - 2, generator=generator)[: PER_TOKEN - 1] for _ in range(num_tokens)
    ]
    ids = torch.stack([torch.cat([row, torch.zeros(1, dtype=torch.int64)]) for row in rows])
    return ids.to(DEVICE)


@pytest.mark.parametrize(
    "num_tokens", [1, 3, *(pytest.param(number, marks=pytest.mark.exhaustive) for number in (17, 40)), 128]
)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_both_products_equal_those_in_float64(num_tokens, is_gated, dtype):
    ids = ids_of(num_tokens)
    x = random(num_tokens, 2 * HIDDEN, dtype=dtype)[:, :HIDDEN]
    up = random(NUM_EXPERTS, (1 + is_gated) * CHANNELS, HIDDEN, dtype=dtype)
    down = random(NUM_EXPERTS, HIDDEN, CHANNELS, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    hidden = few_token_experts._launch(x, up, ids, is_gated=is_gated, is_up=True)
    expected = few_token_up_reference(x.double(), up.double(), ids, is_gated=is_gated)
    assert hidden.shape == expected.shape == (num_tokens, PER_TOKEN, CHANNELS)
    torch.testing.assert_close(hidden.double(), expected, rtol=tolerance, atol=tolerance)
    y = few_token_experts._launch(hidden.flatten(0, 1), down, ids, is_gated=False, is_up=False)
    expected = few_token_down_reference(hidden.double(), down.double(), ids)
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_token_that_is_nan_stays_so_and_leaves_the_others_alone():
    ids, up = ids_of(3), random(NUM_EXPERTS, CHANNELS, HIDDEN, dtype=torch.float16)
    x = random(3, HIDDEN, dtype=torch.float16)
    before = few_token_experts._launch(x, up, ids, is_gated=False, is_up=True)
    x[1] = torch.nan
    after = few_token_experts._launch(x, up, ids, is_gated=False, is_up=True)
    assert after[1].isnan().all()
    assert torch.equal(after[::2], before[::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_experts", "num_inputs"), [(9, 100), (128, 2688)])
def test_the_routers_logits_are_those_in_float64_and_the_same_in_every_batch(num_experts, num_inputs, dtype):
    x = random(3, num_inputs + 5, dtype=dtype)[:, :num_inputs]
    weight = random(num_experts, num_inputs, dtype=torch.float32)
    logits = router_logits._launch(x, weight)
    assert logits.dtype == torch.float32
    expected = router_logits_reference(x.double(), weight.double())
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
    for token in range(3):
        assert torch.equal(router_logits._launch(x[token : token + 1], weight)[0], logits[token])
