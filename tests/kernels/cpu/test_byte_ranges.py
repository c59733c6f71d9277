"""Ranges of bytes are copied like one after the other, however many threads share them."""

import numpy as np
import pytest

from kernels.cpu.byte_ranges import copy_ranges, copy_ranges_reference
from kernels.cpu.threads import set_kernel_threads


@pytest.fixture(params=[1, 2])
def num_threads(request):
    set_kernel_threads(request.param)
    yield request.param
    set_kernel_threads(1)


@pytest.mark.parametrize(("num_ranges", "room"), [(0, 64), (1, 64), (7, 64), (64, 100_000)])
def test_ranges_are_copied_like_one_after_the_other(num_threads, num_ranges, room):
    choose = np.random.default_rng(num_ranges)
    source = choose.integers(0, 256, max(1, num_ranges) * room, dtype=np.uint8)
    target, expected = np.zeros_like(source), np.zeros_like(source)
    ranges = np.empty((3, num_ranges), dtype=np.int64)
    places = choose.permutation(num_ranges) * room
    ranges[1] = source.ctypes.data + choose.permutation(num_ranges) * room
    ranges[2] = choose.integers(0, room, num_ranges, endpoint=True)
    ranges[0] = target.ctypes.data + places
    copy_ranges(ranges)
    ranges[0] = expected.ctypes.data + places
    copy_ranges_reference(ranges)
    assert np.array_equal(target, expected)
