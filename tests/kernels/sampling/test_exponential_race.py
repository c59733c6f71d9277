"""The race against its reference, its distribution, and its noise against SplitMix64."""

import numpy as np
import pytest
import torch

from kernels.sampling import exponential_race as module
from kernels.sampling.exponential_race import exponential_race, exponential_race_reference, noise
from testing.kernels.compiled import output_of


def race(target, weights, least=None, last=None, *, seeds, index):
    """Winners ``[R, T]``; without a least weight and a last token all run."""
    shape = weights.shape[:2]
    least = torch.zeros(shape) if least is None else least
    last = torch.full(shape, weights.shape[2]) if last is None else last
    tensors = [tensor.to(target.device) for tensor in (weights, least, last, seeds, index)]
    run = module._launch if target.name == "triton" else exponential_race
    return run(*tensors).cpu()


def random_case(seed, num_rows, num_positions, vocab_size):
    """Weights of which many are equal and some zero; least weights that some of them have."""
    generator = torch.Generator().manual_seed(seed)

    def ints(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    weights = torch.softmax(torch.randn(num_rows, num_positions, vocab_size, generator=generator) * 3, dim=-1)
    if seed % 2:
        weights = (weights * 400).round() / 400
    at = ints(0, vocab_size, num_rows, num_positions)
    least = weights.gather(2, at[..., None])[..., 0] * (ints(0, 3, num_rows, num_positions) > 0)
    seeds, index = ints(-(2**62), 2**62, num_rows), ints(0, 1 << 20, num_rows, num_positions)
    return weights, least, at, seeds, index


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (3, 4, 50), (2, 1, 511), (1, 2, 1025), (2, 2, 9000), (1, 1, 131072)]
)
@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_the_reference(target, shape, seed):
    weights, least, last, seeds, index = random_case(seed, *shape)
    expected = exponential_race_reference(weights, least, last, seeds, index)
    assert torch.equal(race(target, weights, least, last, seeds=seeds, index=index), expected)


@pytest.mark.exhaustive
def test_a_share_for_each_program_or_one_for_all_have_the_same_winner():
    """How a GPU divides the vocabulary follows the batch; what it draws must not."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    alone = [tensor.to(device) for tensor in random_case(2, 1, 1, 2500)]
    one = module._launch(*alone)
    many = [tensor.expand(200, *tensor.shape[1:]).contiguous() for tensor in alone]
    assert module._launch(*many).tolist() == [[int(one)]] * 200


def test_threads_draw_what_one_does():
    weights, least, last, seeds, index = random_case(0, 5, 3, 131072)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = exponential_race(weights, least, last, seeds, index)
        torch.set_num_threads(4)
        assert torch.equal(exponential_race(weights, least, last, seeds, index), expected)
    finally:
        torch.set_num_threads(before)


def test_each_token_wins_with_its_share():
    """By far the greater part of the weights is tiny, and far apart."""
    count = 100_000
    weights = torch.tensor([1e-30, 0.5, 1e-3, 3e-2, 0.0, 2.0, 0.25, 7e-2] * 2)
    winners = exponential_race(
        weights.expand(1, count, len(weights)).contiguous(),
        torch.zeros(1, count),
        torch.full((1, count), len(weights)),
        torch.tensor([42]),
        torch.arange(count)[None],
    )
    counts = torch.bincount(winners[0], minlength=len(weights)).double()
    assert counts[weights < 1e-20].sum() == 0
    expected = weights.double() / weights.sum() * count
    used = expected > 5
    statistic = float(((counts - expected) ** 2 / expected)[used].sum())
    freedom = int(used.sum()) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_a_rare_token_wins_as_rarely_as_it_should():
    """4,095 tokens of weight 1 against one of 4,095: fails where noise near 0 is too coarse or uneven."""
    count, rare = 4096, 4095
    weights = torch.full((1, count, 4096), 1.0)
    weights[..., 0] = rare
    winners = exponential_race(
        weights,
        torch.zeros(1, count),
        torch.full((1, count), 4096),
        torch.tensor([5]),
        torch.arange(count)[None],
    )
    assert abs(int((winners == 0).sum()) - count / 2) < 5 * (count / 4) ** 0.5
    tail = winners[winners > 0].double()
    assert abs(float(tail.mean()) - 2048) < 5 * 4096 / 12**0.5 / len(tail) ** 0.5, (
        "each as often as the others"
    )


def test_two_races_with_the_same_noise_agree_as_often_as_they_should():
    generator = torch.Generator().manual_seed(3)
    p = torch.softmax(torch.randn(50, generator=generator) * 2, -1)
    q = torch.softmax(p.log() + torch.randn(50, generator=generator) * 0.5, -1)
    count = 100_000
    winners = [
        exponential_race(
            one.expand(1, count, 50).contiguous(),
            torch.zeros(1, count),
            torch.full((1, count), 50),
            torch.tensor([9]),
            torch.arange(count)[None],
        )
        for one in (p, q)
    ]
    ratio = torch.maximum(p[None, :] / p[:, None], q[None, :] / q[:, None])
    share = float((1 / ratio.sum(-1)).sum())
    found = float((winners[0] == winners[1]).double().mean())
    assert abs(found - share) < 5 * (share * (1 - share) / count) ** 0.5
    assert share > 0.9 * float(torch.minimum(p, q).sum())


@pytest.mark.parametrize(("bits", "expected"), [(0, 2.0**-53), (-1, 1 - 2.0**-53)])
def test_noise_is_never_0_or_1_so_every_token_that_runs_arrives(monkeypatch, bits, expected):
    monkeypatch.setattr(module, "_mix", lambda z: torch.full_like(z, bits))
    seeds, index = torch.tensor([7]), torch.tensor([[3]])
    assert noise(seeds, index, torch.tensor(5)).item() == expected
    weights = torch.zeros(1, 1, 50)
    weights[..., 11] = 1e-45
    nothing, everything = torch.zeros(1, 1), torch.full((1, 1), 50)
    assert exponential_race_reference(weights, nothing, everything, seeds, index).item() == 11
    assert 0 < -np.log(1 - expected) / weights[0, 0, 11].double() < module._NEVER


def test_only_tokens_of_the_least_weight_up_to_the_last_run(target):
    weights = torch.tensor([[[0.2, 0.1, 0.4, 0.1, 0.1, 0.1]]])
    drawn = race(
        target,
        weights.expand(200, 1, 6).contiguous(),
        torch.full((200, 1), 0.1),
        torch.full((200, 1), 3),
        seeds=torch.arange(200),
        index=torch.zeros(200, 1, dtype=torch.int64),
    )
    assert set(drawn.flatten().tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("weight", [0.0, float("nan")])
def test_without_a_runner_some_token_is_drawn(target, weight):
    drawn = race(
        target, torch.full((1, 2, 40), weight), seeds=torch.tensor([1]), index=torch.zeros(1, 2).long()
    )
    assert ((drawn >= 0) & (drawn < 40)).all()


def test_noise_is_that_of_splitmix64():
    """The stream of a generator whose state is the key: next() adds the golden ratio, then mixes."""
    golden, wrap = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & wrap
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wrap
        return z ^ (z >> 31)

    assert mix(golden) == 0xE220A8397B1DCDAF, "the first number of seed 0, as published"
    for seed, index in ((0, 0), (-5, 17), (2**62, 131071)):
        key = mix((mix((seed + golden) & wrap) + (index + 1) * golden) & wrap)
        expected = [((mix((key + (v + 1) * golden) & wrap) >> 12) + 0.5) / 2**52 for v in range(9)]
        found = noise(torch.tensor(seed), torch.tensor(index), torch.arange(9))
        assert found.tolist() == expected


@pytest.mark.parametrize("varied", ["seeds", "index", "token_ids"])
def test_noise_spreads_evenly_and_without_order(varied):
    arguments = {name: torch.tensor(3) for name in ("seeds", "index", "token_ids")}
    arguments[varied] = torch.arange(100_000)
    numbers = noise(**arguments)
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert len(numbers.unique()) == numbers.numel()
    counts = torch.histc(numbers.float(), bins=100, min=0, max=1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 99 + 5 * (2 * 99) ** 0.5
    neighbours = np.corrcoef(numbers[:-1].numpy(), numbers[1:].numpy())[0, 1]
    assert abs(neighbours) < 5 / len(numbers) ** 0.5


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.sampling import exponential_race as module

kernel = module._race_kernel
constants = {"BLOCK": module._BLOCK, "NEVER": module._NEVER}
constants |= {name: getattr(module, "_" + name) for name in ("GOLDEN", "MIX_1", "MIX_2")}
types = {"weights_ptr": "*fp32", "least_ptr": "*fp32", "times_ptr": "*fp64"}
for ones in ((), ("num_positions",)):
    values = constants | dict.fromkeys(ones, 1)

    def kind(name):
        return "constexpr" if name in values else types.get(name, "*i64" if name.endswith("_ptr") else "i32")

    signature = {name: kind(name) for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert ".local" not in ptx, "registers spilled"
    print("compiled")
"""


def test_the_kernel_compiles_for_sm_90_without_spills():
    assert output_of(COMPILE).count("compiled") == 2
