"""Pages are copied like one after the other, however many threads share them."""

import numpy as np
import pytest

from kernels.cpu.page_copies import copy_pages, copy_pages_reference
from kernels.cpu.threads import set_kernel_threads


@pytest.fixture(params=[1, 2])
def num_threads(request):
    set_kernel_threads(request.param)
    yield request.param
    set_kernel_threads(1)


def places(memory, lengths, room):
    return np.stack((memory.ctypes.data + room * np.arange(len(lengths)), lengths))


@pytest.mark.parametrize(("num_pages", "room"), [(0, 64), (1, 64), (7, 100), (64, 100_000)])
def test_pages_are_copied_like_one_after_the_other(num_threads, num_pages, room):
    choose = np.random.default_rng(num_pages)
    source = choose.integers(0, 256, max(1, num_pages) * room, dtype=np.uint8)
    target, expected = np.zeros_like(source), np.zeros_like(source)
    lengths = choose.integers(0, room, (2, num_pages), endpoint=True)
    out_of = places(source, lengths[0], room)
    targets, sources = (choose.permutation(num_pages).tolist() for _ in range(2))
    copy_pages(places(target, lengths[1], room), targets, out_of, sources)
    copy_pages_reference(places(expected, lengths[1], room), targets, out_of, sources)
    assert np.array_equal(target, expected)
