"""The checks under which all kernels are tested (testing/kernels/hardened) find what they are for.

The fixture ``checked_launches`` of tests/kernels/conftest.py runs every test here too. A kernel
of this file has one fault that a GPU punishes and the interpreter forgives.
"""

import pytest
import torch

from kernels.gpu.triton_jit import tl, triton_jit

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")


@triton_jit
def _shift_by_programs(x_ptr):
    i = tl.program_id(0)
    tl.store(x_ptr + i + 1, tl.load(x_ptr + i))


@triton_jit
def _last_program_wins(x_ptr):
    tl.store(x_ptr, tl.program_id(0))


@triton_jit
def _shift(x_ptr, BLOCK: tl.constexpr, HAS_BARRIER: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    if HAS_BARRIER:
        tl.debug_barrier()
    tl.store(x_ptr + (i + 1) % BLOCK, x)


@triton_jit
def _store_then_load(x_ptr, y_ptr, BLOCK: tl.constexpr, HAS_BARRIER: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, i)
    if HAS_BARRIER:
        tl.debug_barrier()
    tl.store(y_ptr + i, tl.load(x_ptr + BLOCK - 1 - i))


@triton_jit
def _double(x_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, 2 * tl.load(x_ptr + i))


@triton_jit
def _copy(x_ptr, y_ptr, stride, size, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i * stride), mask=i < size)


@triton_jit
def _copy_without_other(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < size))


@triton_jit
def _all_store_to_one(x_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i // 2, i)


@triton_jit
def _square_of_a_stride(x_ptr, y_ptr, stride):
    tl.store(y_ptr, stride * stride)


def counted(size):
    return torch.arange(size, dtype=torch.int32)


def refused(message):
    return pytest.raises(Exception, match=message)  # Triton wraps what is raised inside a program


def test_a_program_that_reads_what_another_writes_is_refused():
    with refused("(loads|stores) what program"):
        _shift_by_programs[(5,)](counted(6))


def test_two_programs_that_write_one_element_are_refused():
    with refused("stores what program"):
        _last_program_wins[(5,)](counted(1))


@pytest.mark.parametrize("kernel", [_shift, _store_then_load])
def test_threads_that_exchange_by_memory_need_a_barrier(kernel):
    operands = [counted(8)] * 1 if kernel is _shift else [counted(8), counted(8)]
    with refused("barrier"):
        kernel[(1,)](*operands, BLOCK=8, HAS_BARRIER=False)
    kernel[(1,)](*operands, BLOCK=8, HAS_BARRIER=True)
    assert operands[-1].tolist() == ([7, *range(7)] if kernel is _shift else [*reversed(range(8))])


def test_work_in_place_needs_no_barrier_and_happens_once():
    x = counted(8)
    _double[(1,)](x, BLOCK=8)
    assert x.tolist() == [*range(0, 16, 2)]


def test_every_address_belongs_to_an_operand():
    x = counted(32)
    _copy[(1,)](x[:16:2], counted(8), 2, 8, BLOCK=8)
    for operand, stride in ((x[:8], 2), (x[:16:2], 1), (x[16:], -1)):
        with refused("no element|no operand"):
            _copy[(1,)](operand, counted(8), stride, 8, BLOCK=8)


def test_lanes_that_were_not_loaded_have_no_value():
    with pytest.raises(AssertionError, match="two runs from the same operands differ"):
        _copy_without_other[(1,)](counted(8), counted(8), 5, BLOCK=8)


def test_lanes_that_store_to_one_element_are_refused():
    with refused("several lanes"):
        _all_store_to_one[(1,)](counted(8), BLOCK=8)


def test_an_overflow_of_32_bits_is_refused():
    _square_of_a_stride[(1,)](counted(1), counted(1), 1 << 15)
    with refused("overflow"):
        _square_of_a_stride[(1,)](counted(1), counted(1), 1 << 16)


def test_new_tensors_hold_nan():
    assert torch.empty(3).isnan().all()
