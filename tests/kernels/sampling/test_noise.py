"""The noise against its formula in Python's integers, and how evenly it spreads."""

import numpy as np
import pytest
import torch

from kernels.sampling import noise as module
from kernels.sampling.noise import noise, noise_key, token_noise

GOLDEN, WRAP, WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1, (1 << 32) - 1


def mix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WRAP
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WRAP
    return z ^ (z >> 31)


def formula(seed, index, token):
    key = mix((mix((seed + GOLDEN) & WRAP) + (index + 1) * GOLDEN) & WRAP)
    z = (token * 0x9E3779B9 + key) & WORD
    z = (((z ^ (z >> 16)) * 0x7FEB352D) & WORD) ^ (key >> 32)
    z = ((z ^ (z >> 15)) * 0x846CA68B) & WORD
    fine = mix((key + (token + 1) * GOLDEN) & WRAP) >> 44
    return ((((z ^ (z >> 16)) << 20) | fine) + 0.5) / 2**52


def test_noise_is_that_of_its_formula():
    assert mix(GOLDEN) == 0xE220A8397B1DCDAF, "SplitMix64's first number of seed 0, as published"
    for seed, index in ((0, 0), (-5, 17), (2**62, 131071)):
        expected = [formula(seed, index, v) for v in (0, 1, 2, 40_000, 262_143)]
        tokens = torch.tensor([0, 1, 2, 40_000, 262_143])
        assert noise(torch.tensor(seed), torch.tensor(index), tokens).tolist() == expected
        key = noise_key.dispatcher(seed, index)
        assert [token_noise.dispatcher(np.uint64(key), v) for v in tokens.tolist()] == expected


@pytest.mark.parametrize("varied", ["seeds", "index", "token_ids"])
def test_noise_spreads_evenly_and_without_order(varied):
    arguments = {name: torch.tensor(3) for name in ("seeds", "index", "token_ids")}
    arguments[varied] = torch.arange(100_000)
    numbers = noise(**arguments)
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert len(numbers.unique()) == numbers.numel()
    for part in (numbers, numbers * 1024 % 1, numbers * 2**32 % 1):
        counts = torch.histc(part.float(), bins=100, min=0, max=1)
        assert float(((counts - 1000) ** 2 / 1000).sum()) < 99 + 5 * (2 * 99) ** 0.5
    neighbours = np.corrcoef(numbers[:-1].numpy(), numbers[1:].numpy())[0, 1]
    assert abs(neighbours) < 5 / len(numbers) ** 0.5


def test_tokens_of_two_positions_have_nothing_in_common():
    """Also where one position's tokens are shifted against the other's."""
    numbers = noise(torch.tensor(1), torch.arange(2)[:, None], torch.arange(50_000))
    for shift in range(-3, 4):
        found = np.corrcoef(numbers[0, 3:-3].numpy(), numbers[1].roll(shift)[3:-3].numpy())[0, 1]
        assert abs(found) < 5 / 50_000**0.5


@pytest.mark.parametrize(("bits", "expected"), [(0, 2.0**-53), (-1, 1 - 2.0**-53)])
def test_noise_is_never_0_or_1(monkeypatch, bits, expected):
    monkeypatch.setattr(module, "_mix", lambda z: torch.full_like(z, bits))
    monkeypatch.setattr(module, "_coarse", lambda key, token_ids: torch.tensor(bits & WORD))
    assert noise(torch.tensor(7), torch.tensor(3), torch.tensor(5)).item() == expected
