import pytest
import torch

from kernels.cpu.jit import FlatArray, as_array, cpu_jit
from kernels.cpu.vector import lanes, load, rounded, rounded_number, store, store_number
from kernels.cpu.vector import rounding_key as cpu_rounding_key
from kernels.formats.stochastic_round import (
    NEAREST,
    StateRounding,
    round_bfloat16_reference,
    round_state,
    rounding_key,
)
from kernels.gpu.triton_jit import tl, triton_jit
from testing.kernels.compiled import output_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where Triton's kernels run: interpreted on a CPU."""


@cpu_jit
def _round_vectors(x, out, is_stochastic, seed, head, position):
    key = cpu_rounding_key(seed, head, position)
    for i in range(0, x.shape[0], lanes()):
        store(out, i, rounded(out, load(x, i), is_stochastic, key, i, 1))


@cpu_jit
def _round_numbers(x, out, is_stochastic, seed, head, position):
    key = cpu_rounding_key(seed, head, position)
    for i in range(x.shape[0]):
        store_number(out, i, rounded_number(out, x[i], is_stochastic, key, i))


@triton_jit
def _round_kernel(x_ptr, out_ptr, seed, head, position, BLOCK: tl.constexpr, STOCHASTIC: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = rounding_key(tl.cast(seed, tl.int64), tl.cast(head, tl.int32), tl.cast(position, tl.int32))
    stored = round_state(tl.load(x_ptr + i), key, i, out_ptr.dtype.element_ty, STOCHASTIC)
    tl.store(out_ptr + i, stored.to(out_ptr.dtype.element_ty))


def rounded_by(way, x, rounding, head, position, dtype=torch.bfloat16):
    out = torch.zeros(len(x), dtype=dtype)
    seed = rounding.layer_seed
    if way == "triton":
        x, out = x.to(DEVICE), out.to(DEVICE)
        _round_kernel[(len(x) // 16,)](
            x, out, seed, head, position, BLOCK=16, STOCHASTIC=rounding.is_stochastic
        )
    else:
        kernel = {"vectors": _round_vectors, "numbers": _round_numbers}[way]
        kernel(as_array(x), FlatArray(out).numpy(), int(rounding.is_stochastic), seed, head, position)
    return out.cpu()


def some_numbers():
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-37, 3.3e38, 1.0, -1.00390625])
    scale = 10.0 ** torch.randint(-6, 6, (1024 - len(special),))
    return torch.cat([special, torch.randn(len(scale)) * scale])


@pytest.mark.parametrize("way", ["vectors", "numbers", "triton"])
@pytest.mark.parametrize("rounding", [NEAREST, StateRounding.stochastic(3)], ids=["nearest", "stochastic"])
def test_every_path_rounds_to_the_same_bits(way, rounding):
    x = some_numbers()
    expected = round_bfloat16_reference(x.expand(8, -1), torch.tensor(40_000), rounding)[5]
    found = rounded_by(way, x, rounding, head=5, position=40_000)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    # What has a bfloat16 is that one.
    again = rounded_by(way, expected.float(), rounding, head=1, position=2)
    torch.testing.assert_close(again, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("way", ["vectors", "numbers", "triton"])
def test_float32_pools_are_left_alone(way):
    x = some_numbers()
    found = rounded_by(way, x, StateRounding.stochastic(3), head=5, position=7, dtype=torch.float32)
    torch.testing.assert_close(found, x, rtol=0, atol=0, equal_nan=True)


def test_a_rank_with_a_share_of_the_heads_rounds_them_as_one_with_all():
    x, positions = torch.randn(2, 8, 4, 16), torch.tensor([5, 900])
    whole = round_bfloat16_reference(x, positions, StateRounding.stochastic(1))
    share = round_bfloat16_reference(x[:, 6:], positions, StateRounding.stochastic(1, first_head=6))
    assert torch.equal(share, whole[:, 6:])


def test_the_expectation_of_a_stochastically_rounded_number_is_the_number():
    step = 2.0**-7  # between 1 and 2
    for fraction in (0.01, 0.25, 0.5, 0.9):
        x = torch.full((64, 256), 1 + fraction * step)
        ups = [
            (round_bfloat16_reference(x, torch.tensor(position), StateRounding.stochastic(layer)) > 1).float()
            for layer in range(4)
            for position in range(16)
        ]
        share = torch.stack(ups)
        assert share.mean().item() == pytest.approx(fraction, abs=0.002)
        # Neither position, head nor element has a leaning of its own.
        for dims in ((1, 2), (0, 2), (0, 1)):
            means = share.mean(dim=dims)
            deviation = (fraction * (1 - fraction) / (share.numel() / means.numel())) ** 0.5
            assert ((means - fraction).abs() < 5 * deviation).all()


def test_noise_of_neighbouring_tokens_heads_layers_and_elements_is_uncorrelated():
    def ups(layer, position):
        x = torch.full((64, 1024), 1 + 2.0**-8)
        rounding = StateRounding.stochastic(layer)
        return (round_bfloat16_reference(x, torch.tensor(position), rounding) > 1).float() - 0.5

    here = ups(0, 10)
    others = [ups(0, 11), ups(1, 10), here.roll(1, 0), here.roll(1, 1), ups(0, 10 + 2**16)]
    for other in others:
        assert (here * other).mean().abs() * 4 < 5 / here.numel() ** 0.5


COMPILE = """
from tests.kernels.formats.test_stochastic_round import _round_kernel
from testing.kernels.sm_90 import compile_kernel

for stochastic in (True, False):
    compile_kernel(_round_kernel, {"BLOCK": 128, "STOCHASTIC": stochastic}, {"x_ptr": "*fp32", "*": "*bf16"})
"""


@pytest.mark.exhaustive
def test_compiles_for_sm_90():
    output_of(COMPILE)
