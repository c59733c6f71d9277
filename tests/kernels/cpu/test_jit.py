import math

import numpy as np
import pytest
import torch

from kernels.cpu.jit import FlatArray, as_array, cpu_jit


@cpu_jit
def _half(x):
    return np.float32(0.5) * x


@cpu_jit
def _add_half_of_sum(x, counts, begin, end):
    total = np.float32(0.0)
    for i in range(x.shape[0]):
        total += x[i]
    for i in range(begin, end):
        counts[i] += _half(total)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize(("num_items", "grain"), [(0, 1), (1, 1), (7, 3), (100, 1), (100, 60), (5, 1000)])
def test_every_item_is_worked_on_once_whatever_the_shares(num_threads, num_items, grain):
    counts = torch.zeros(num_items + 1)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        _add_half_of_sum.parallel_for(num_items, grain, as_array(torch.ones(2)), as_array(counts))
    finally:
        torch.set_num_threads(before)
    assert counts.tolist() == [1.0] * num_items + [0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_survive_reordered_sums(bad):
    x, counts = torch.ones(1000), torch.zeros(1)
    x[777] = bad
    _add_half_of_sum(as_array(x), as_array(counts), 0, 1)
    np.testing.assert_equal(counts.item(), bad)


def test_a_strided_view_is_flat_from_its_first_element_to_its_last():
    base = torch.arange(100.0)
    view = base.as_strided((2, 3, 4), (40, 6, 1), 5)
    flat = FlatArray(view).numpy()
    assert flat.flags.c_contiguous
    assert (flat[0], flat[-1], len(flat)) == (5.0, view[1, 2, 3].item(), 56)
    flat[0] = -1.0
    assert base[5] == -1.0
    assert len(FlatArray(torch.empty(0, 3)).numpy()) == 0
