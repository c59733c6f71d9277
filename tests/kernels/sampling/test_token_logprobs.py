"""Log-probabilities, ranks and best tokens against the reference in float64."""

import pytest
import torch

from kernels.sampling import token_logprobs as module
from kernels.sampling.token_logprobs import token_logprobs, token_logprobs_reference


@pytest.mark.parametrize(("vocab_size", "num_top"), [(1, 1), (7, 0), (50, 50), (512, 5), (3000, 20)])
def test_agrees_with_the_reference(target, vocab_size, num_top):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator) * 4
    token_ids = torch.randint(0, vocab_size, (5,), generator=generator)
    expected, places = token_logprobs_reference(logits.double(), token_ids, num_top)
    run = module._launch if target.name == "triton" else token_logprobs
    numbers, integers = run(logits.to(target.device), token_ids.to(target.device), num_top)
    assert torch.equal(integers.cpu(), places)
    assert torch.allclose(numbers.cpu().double(), expected, atol=2e-6, rtol=1e-6)


def test_of_equal_logits_the_lower_tokens_come_first():
    logits = torch.randn(4, 900).mul(2).round()
    token_ids = torch.zeros(4, dtype=torch.int64)
    integers = token_logprobs(logits, token_ids, 20)[1]
    assert torch.equal(integers, token_logprobs_reference(logits, token_ids, 20)[1])


def test_very_unlikely_tokens_and_large_logits_stay_finite():
    logits = torch.tensor([[3e4, -3e4, 2.9999e4, -torch.inf]])
    numbers, integers = token_logprobs(logits, torch.tensor([1]), 2)
    assert numbers[0, 0].item() == pytest.approx(-60000.3133, abs=0.01)
    assert integers.tolist() == [[1, 3, 0, 2]]
