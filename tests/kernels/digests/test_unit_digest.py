import numpy as np
import pytest
import torch

from kernels.digests import unit_digest as module
from kernels.digests.unit_digest import (
    MIX,
    STRIPE,
    PoolDigests,
    array_digest,
    unit_digests_reference,
)

SIZES = [1, 7, STRIPE - 1, STRIPE, STRIPE + 1, 3 * STRIPE + 130]


def digests(target, words, units):
    if target.name == "triton":
        units = torch.tensor(units, dtype=torch.int64, device=target.device)
        return unsigned(module._launch(words.to(target.device), units))
    return PoolDigests(words)(units)


def unsigned(digests):
    return digests.cpu().numpy().view(np.uint64).tolist()


def random_words(*shape, seed=0):
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.integers(-(2**63), 2**63, shape, dtype=np.int64))


def by_hand(words):
    """The formula, in Python's integers."""
    keys = module._mixed(0, STRIPE).tolist()
    weights = [int(w) | 1 for w in module._mixed(STRIPE, 8)]
    digest = 0
    for place, word in enumerate(words):
        x = word % 2**64
        keyed = x ^ keys[place % STRIPE]
        digest += weights[place // STRIPE] * ((keyed & 0xFFFFFFFF) * (keyed >> 32) + int(MIX) * x)
    return digest % 2**64


@pytest.mark.parametrize("size", SIZES)
def test_a_digest_is_the_formula_s_for_any_size_and_order_of_units(target, size):
    words = random_words(5, size)
    expected = [by_hand(row) for row in words.tolist()]
    assert digests(target, words, [3, 0, 3, 4]) == [expected[i] for i in (3, 0, 3, 4)]
    assert unsigned(unit_digests_reference(words, torch.arange(5))) == expected


def test_pools_without_bytes_and_no_units_have_no_digests(target):
    assert digests(target, random_words(4, 0), [1, 2]) == [0, 0]
    assert digests(target, random_words(4, 8), []) == []


@pytest.mark.parametrize("size", [1, 7, 130])
def test_every_bit_counts(size):
    words = random_words(1, size)
    changed = words.repeat(64 * size, 1)
    for place in range(size):
        for bit in range(64):
            changed[64 * place + bit, place] ^= -(2**63) if bit == 63 else 1 << bit
    found, sound = PoolDigests(changed)(range(len(changed))), PoolDigests(words)([0])
    assert len({*found, *sound}) == 64 * size + 1


def test_words_that_changed_places_are_found():
    words = random_words(1, 2 * STRIPE)
    places = [(0, 1), (0, STRIPE), (5, STRIPE + 5), (STRIPE - 1, STRIPE)]
    swapped = words.repeat(len(places), 1)
    for row, (a, b) in enumerate(places):
        swapped[row, [a, b]] = swapped[row, [b, a]]
    whole_stripes = words.view(2, STRIPE).flip(0).reshape(1, -1)
    found = PoolDigests(torch.cat([words, swapped, whole_stripes]))(range(len(places) + 2))
    assert len(set(found)) == len(places) + 2


def test_values_like_a_cache_s_do_not_collide():
    """Sign bits, zeros and repeated values: what damage of floating-point numbers looks like."""
    halves = torch.randn(1, 4 * STRIPE).to(torch.bfloat16)
    rows = [halves.clone() for _ in range(200)]
    generator = torch.Generator().manual_seed(1)
    for count, row in enumerate(rows[1:]):
        places = torch.randperm(row.shape[1], generator=generator)[: 2 + count % 7]
        row[0, places] = [-row[0, places], torch.zeros(len(places)), row[0, places.flip(0)]][count % 3].to(
            row.dtype
        )
    words = torch.cat(rows).view(torch.int64)
    assert len(set(PoolDigests(words)(range(200)))) == 200


def test_an_array_has_the_digest_of_a_unit_with_zeros_behind_it():
    words = random_words(1, STRIPE + 9)
    halves = words.numpy().view(np.int16)[0]
    some = halves[: 4 * STRIPE].reshape(-1, 4)[:, :2]
    assert array_digest(some) == by_hand(np.ascontiguousarray(some).reshape(-1).view(np.int64).tolist())
    padded = np.append(halves[:5], np.zeros(3, dtype=np.int16)).view(np.int64)
    assert array_digest(halves[:5]) == by_hand(padded.tolist())
