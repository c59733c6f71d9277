import numpy as np
import pytest
import torch

from kernels.cpu.jit import FlatArray, as_array, cpu_jit
from kernels.cpu.vector import lanes, load, load_number, store, store_number
from kernels.formats.float8 import narrow, to_e4m3, widen
from kernels.gpu.triton_jit import tl, triton_jit
from testing.kernels.compiled import output_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where Triton's kernels run: interpreted on a CPU."""


@cpu_jit
def _copy_vectors(source, target):
    for i in range(0, source.shape[0], lanes()):
        store(target, i, load(source, i))


@cpu_jit
def _copy_numbers(source, target):
    for i in range(source.shape[0]):
        store_number(target, i, load_number(source, i))


@triton_jit
def _narrow_kernel(x_ptr, out_ptr, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, narrow(tl.load(x_ptr + i), scale, out_ptr.dtype.element_ty))


@triton_jit
def _widen_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, widen(tl.load(x_ptr + i), out_ptr.dtype.element_ty))


def narrowed(way, x):
    out = torch.zeros(len(x), dtype=torch.float8_e4m3fn)
    if way == "triton":
        x, out = x.to(DEVICE), out.to(DEVICE)
        _narrow_kernel[(len(x) // 16,)](x, out.view(torch.uint8), 1.0, BLOCK=16)
    else:
        {"vectors": _copy_vectors, "numbers": _copy_numbers}[way](as_array(x), FlatArray(out).numpy())
    return out.cpu()


def widened(way, x):
    out = torch.zeros(len(x))
    if way == "triton":
        x, out = x.to(DEVICE), out.to(DEVICE)
        _widen_kernel[(len(x) // 16,)](x.view(torch.uint8), out, BLOCK=16)
    else:
        {"vectors": _copy_vectors, "numbers": _copy_numbers}[way](FlatArray(x).numpy(), as_array(out))
    return out.cpu()


def all_values():
    """The 254 finite values, by the formula in float64."""
    bytes_ = np.arange(256)
    exponent, mantissa = (bytes_ >> 3) & 15, bytes_ & 7
    size = np.where(exponent == 0, 2.0**-6 * mantissa / 8, 2.0 ** (exponent - 7.0) * (1 + mantissa / 8))
    values = np.where(bytes_ & 128, -size, size)
    values[[0x7F, 0xFF]] = np.nan
    return torch.from_numpy(values)


WAYS = ("vectors", "numbers", "triton")


@pytest.mark.parametrize("way", WAYS)
def test_every_byte_is_widened_to_its_value(way):
    stored = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    torch.testing.assert_close(widened(way, stored), all_values().float(), rtol=0, atol=0, equal_nan=True)
    assert widened(way, stored)[0x80].signbit()


@pytest.mark.parametrize("way", [*WAYS, "reference"])
def test_numbers_go_to_the_nearest_value_and_ties_to_the_even_one(way):
    values = all_values()[:0x7F].float()
    middles = (values[1:] + values[:-1]) / 2
    above, below = torch.nextafter(middles, values[1:]), torch.nextafter(middles, values[:-1])
    x = torch.cat([values, middles, above, below, torch.tensor([-0.0, 1e-40])])
    index = torch.arange(0x7E)
    even = index + index % 2
    expected = torch.cat([torch.arange(0x7F), even, index + 1, index, torch.tensor([0x80, 0])])
    padding = -len(x) % 16
    x, expected = (torch.nn.functional.pad(t, (0, padding)) for t in (x, expected))
    found = to_e4m3(x) if way == "reference" else narrowed(way, x)
    assert found.view(torch.uint8).tolist() == expected.tolist()
    if way == "reference":
        return
    mirrored = narrowed(way, -x).view(torch.uint8)
    assert mirrored.tolist() == (expected ^ 0x80).tolist()


@pytest.mark.parametrize("way", [*WAYS, "reference"])
def test_what_is_too_large_saturates_and_what_is_not_finite_becomes_nan(way):
    x = torch.tensor([449.0, 464.0, 465.0, 1e30, -500.0, torch.inf, -torch.inf, torch.nan] * 2)
    found = (to_e4m3(x) if way == "reference" else narrowed(way, x)).float()
    assert found[:5].tolist() == [448.0] * 4 + [-448.0]
    assert found[5:8].isnan().all()


COMPILE = """
from tests.kernels.formats.test_float8 import _narrow_kernel, _widen_kernel
from testing.kernels.sm_90 import compile_kernel

compile_kernel(_narrow_kernel, {"BLOCK": 128}, {"*": "*u8", "x_ptr": "*bf16", "scale": "fp32"})
for kind in ("*u8", "*fp8e4nv"):
    ptx = compile_kernel(_widen_kernel, {"BLOCK": 128}, {"*": "*bf16", "x_ptr": kind}).ptx
    print("e4m3x2" in ptx)
"""


@pytest.mark.exhaustive
def test_compiles_for_a_gpu_with_and_without_instructions_for_it():
    assert output_of(COMPILE).split() == ["False", "True"]
