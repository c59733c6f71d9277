"""Vector registers in CPU kernels."""

import math

import numpy as np
import torch

from kernels.cpu.jit import cpu_jit
from kernels.cpu.vector import (
    add,
    aligned,
    broadcast,
    divide,
    exponential,
    lanes,
    largest_of,
    load,
    load_3,
    load_4,
    maximum,
    multiply,
    multiply_add,
    row_sums,
    silu,
    splat,
    store,
    store_3,
    subtract,
    sum_of,
    transpose,
)


@cpu_jit
def _by_lane(a, b, out):
    x, y, w = load(a, 0), load(b, 0), lanes()
    store(out, 0, add(x, y))
    store(out, w, subtract(x, y))
    store(out, 2 * w, multiply(x, y))
    store(out, 3 * w, divide(x, y))
    store(out, 4 * w, maximum(x, y))
    store(out, 5 * w, multiply_add(x, y, splat(a[0])))
    store(out, 6 * w, broadcast(b, 1))


@cpu_jit
def _exponentials(x, out):
    for i in range(0, x.shape[0], lanes()):
        store(out, i, exponential(load(x, i)))


@cpu_jit
def _silus(x, out):
    for i in range(0, x.shape[0], lanes()):
        store(out, i, silu(load(x, i)))


@cpu_jit
def _folded(x, out):
    out[0], out[1] = sum_of(load(x, 0)), largest_of(load(x, 0))


@cpu_jit
def _transposed(x, row_stride, out, out_stride):
    transpose(x, 3, row_stride, out, 5, out_stride)


@cpu_jit
def _summed_rows(a, out):
    store(out, 0, row_sums(a, 1))


@cpu_jit
def _alternating(x, out):
    w = lanes()
    a, b, c = load_3(x, 1)
    store_3(out, 2, b, c, a)
    a, b, c, d = load_4(x, 1)
    store(out, 2 + 3 * w, a)
    store(out, 2 + 4 * w, b)
    store(out, 2 + 5 * w, c)
    store(out, 2 + 6 * w, d)


@cpu_jit
def _lanes(out):
    out[0] = lanes()


@cpu_jit
def _aligned(out):
    for count in range(out.shape[0]):
        floats = aligned(count)
        out[count] = floats.ctypes.data % 64 + floats.shape[0] - count


def width() -> int:
    found = np.zeros(1, np.int64)
    _lanes(found)
    return int(found[0])


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def test_arithmetic_goes_lane_by_lane():
    w = width()
    a, b = random(2, w)
    out = np.zeros((7, w), np.float32)
    _by_lane(a, b, out.ravel())
    expected = [a + b, a - b, a * b, a / b, np.maximum(a, b), a * b + a[0], np.full(w, b[1])]
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


def test_exponential_is_exact_to_rounding_and_keeps_nan():
    x = np.concatenate([np.linspace(-95, 87, 509), [math.nan, -math.inf, 0]]).astype(np.float32)
    out = np.empty_like(x)
    _exponentials(x, out)
    expected = np.where(x < -126.5 * math.log(2), 0, np.exp(x.astype(np.float64)))
    np.testing.assert_allclose(out, expected, rtol=5e-7)


def test_silu_is_exact_to_rounding_and_keeps_nan():
    x = np.concatenate([np.linspace(-90, 90, 508), [math.nan, -1000, 1000, 0]]).astype(np.float32)
    out = np.empty_like(x)
    _silus(x, out)
    wide = torch.from_numpy(x).double()
    np.testing.assert_allclose(out, torch.nn.functional.silu(wide).numpy(), rtol=2e-6, atol=1e-30)


def test_a_vector_folds_into_its_sum_and_its_largest():
    x = random(width())
    out = np.zeros(2, np.float32)
    _folded(x, out)
    np.testing.assert_allclose(out, [x.sum(), x.max()], rtol=1e-5)


def test_each_lane_sums_its_own_row():
    w = width()
    a, out = random(1 + w * w), np.zeros(w, np.float32)
    _summed_rows(a, out)
    np.testing.assert_allclose(out, a[1:].reshape(w, w).sum(axis=1), rtol=1e-4, atol=1e-5)


def test_vectors_whose_elements_alternate_are_sorted_and_put_back():
    w = width()
    x, out = random(1 + 4 * w), np.zeros(2 + 7 * w, np.float32)
    _alternating(x, out)
    threes, fours = x[1 : 1 + 3 * w].reshape(w, 3), x[1:].reshape(w, 4)
    np.testing.assert_array_equal(out[2 : 2 + 3 * w].reshape(w, 3), threes[:, [1, 2, 0]])
    np.testing.assert_array_equal(out[2 + 3 * w :].reshape(4, w), fours.T)


def test_a_block_is_transposed_at_any_stride():
    w = width()
    x, flat = random(w + 1, w + 9), np.zeros(w * (w + 4) + 8, np.float32)
    _transposed(x.ravel(), w + 9, flat, w + 4)
    found = flat[5 : 5 + w * (w + 4)].reshape(w, w + 4)[:, :w]
    np.testing.assert_array_equal(found, x[:w, 3 : 3 + w].T)


def test_scratch_starts_at_a_cache_line():
    wrong = np.ones(33, np.int64)
    _aligned(wrong)
    assert not wrong.any()
