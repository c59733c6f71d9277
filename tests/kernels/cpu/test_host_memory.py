"""Memory of tensors on the host: aligned, of any dtype, zero where that is asked for."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.host_memory import CACHE_LINE, HUGE_PAGE, host_empty, host_zeros


@pytest.mark.parametrize(("num_elements", "unit"), [(0, CACHE_LINE), (100, CACHE_LINE), (1 << 20, HUGE_PAGE)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_begins_at_a_cache_line_or_at_a_huge_page(num_elements, unit, dtype):
    tensor = host_empty(num_elements, dtype)
    assert (tensor.shape, tensor.dtype) == ((num_elements,), dtype)
    assert num_elements == 0 or tensor.data_ptr() % unit == 0
    tensor.fill_(1)


def test_zeros_have_shape_and_dtype():
    tensor = host_zeros((3, 5, 7), torch.bfloat16)
    assert (tensor.shape, tensor.dtype) == ((3, 5, 7), torch.bfloat16)
    assert not tensor.any()


def test_large_zeros_begin_at_a_huge_page():
    assert host_zeros((1 << 19,), torch.float32).data_ptr() % HUGE_PAGE == 0
