"""Calls that are noted and made later: in order, with what they need, and before anything needs them."""

import random
import threading
import time

import numpy as np
import pytest
import torch

from kernels.cpu import call_list, threads
from kernels.cpu.call_list import LONG_CALLS, MOST_CALLS, batched_calls
from kernels.cpu.graph import CpuGraph
from kernels.cpu.jit import FlatArray, cpu_jit, settle
from kernels.cpu.threads import cpu_threads
from testing.conditions import wait_until
from testing.kernels.pending_calls import watch_batches


@cpu_jit
def _append(sums, number, begin, end):
    for i in range(begin, end):
        sums[i] = sums[i] * 10 + number


@pytest.fixture
def sums():
    return torch.zeros(3, dtype=torch.float64)


def note(sums, *numbers):
    for number in numbers:
        _append.parallel_for(len(sums), 1, sums, np.float32(number))


def test_a_batch_makes_its_calls_in_order_at_its_end(sums):
    with batched_calls():
        note(sums, 1, 2, 3)
        assert sums.tolist() == [0, 0, 0]
    assert sums.tolist() == [123, 123, 123]


def test_calls_are_made_before_a_batch_grows_large(sums):
    with batched_calls():
        note(sums, *[0] * (MOST_CALLS - 1), 7)
        assert sums.tolist() == [7, 7, 7]
        note(sums, 8)
    assert sums.tolist() == [78, 78, 78]


def test_a_batch_of_long_calls_has_fewer(sums, monkeypatch):
    calls = [*[0] * (LONG_CALLS - 1), 5]
    shares = len(sums)  # of each call: an item each
    monkeypatch.setattr(call_list, "LONG_SHARES", shares * (LONG_CALLS + 1))
    with batched_calls():
        note(sums, *calls)
        assert sums.tolist() == [0, 0, 0]
        note(sums, 6)
        assert sums.tolist() == [56, 56, 56]
        note(sums, *[0] * LONG_CALLS)
        assert sums.tolist() == [56, 56, 56]


def test_what_needs_results_gets_them(sums):
    with batched_calls():
        note(sums, 4)
        settle()
        assert sums.tolist() == [4, 4, 4]
        note(sums, 5)
        _append(sums.numpy(), np.float32(6), 0, 3)
        assert sums.tolist() == [456, 456, 456]


def test_a_graph_refuses_to_settle(sums):
    graph = CpuGraph()

    def read_results():
        with graph.record():
            note(sums, 1)
            settle()

    with pytest.raises(RuntimeError, match="needed before they have run"):
        read_results()
    note(sums, 2)
    assert sums.tolist() == [2, 2, 2]


def test_calls_of_a_batch_that_failed_are_not_made(sums):
    def fail():
        with batched_calls():
            note(sums, 1)
            raise ValueError("midway")

    with pytest.raises(ValueError, match="midway"):
        fail()
    note(sums, 2)
    assert sums.tolist() == [2, 2, 2]


def test_memory_that_a_pending_call_writes_is_not_given_to_others():
    with batched_calls():
        note(torch.zeros(1 << 16), 1)
        others = [torch.full((1 << 16,), 5.0) for _ in range(4)]
    assert all((one == 5.0).all() for one in others)


@pytest.fixture
def watched(monkeypatch):
    watch_batches(monkeypatch)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("compute", [lambda x: x + 1, lambda x: x.tolist(), lambda x: torch.cat([x, x])])
def test_the_watch_finds_what_torch_reads_too_early(sums, compute):
    def read():
        with batched_calls():
            note(sums, 1)
            compute(sums[1:2])

    with pytest.raises(RuntimeError, match="before a call wrote it: settle first"):
        read()


@pytest.mark.usefixtures("watched")
def test_the_watch_finds_what_torch_overwrites_too_early(sums):
    def overwrite():
        with batched_calls():
            note(sums, 1)
            sums.zero_()

    with pytest.raises(RuntimeError, match="zero_ overwrites"):
        overwrite()


@pytest.mark.usefixtures("watched")
def test_torch_may_read_what_calls_read(sums):
    addend = torch.ones(3)
    with batched_calls():
        _add.parallel_for(3, 1, sums, addend)
        other = addend * 2
    assert (sums + other).tolist() == [3, 3, 3]


@cpu_jit
def _add(sums, addend, begin, end):
    for i in range(begin, end):
        sums[i] += addend[i]


@pytest.mark.parametrize("view", ["whole", "columns", "transposed", "flat"])
def test_tensors_are_passed_like_their_arrays(view):
    base = torch.arange(12.0).view(3, 4)
    tensor = {"whole": base, "columns": base[:, 1:3], "transposed": base.T, "flat": FlatArray(base)}[view]
    found = torch.zeros(16)
    kernel = _copy_flat if view == "flat" else _copy_rows
    kernel.parallel_for(1, 1, tensor, found)
    expected = base.reshape(-1) if view == "flat" else tensor.reshape(-1)
    assert found[: len(expected)].tolist() == expected.tolist()
    assert not found[len(expected) :].any()


@cpu_jit
def _copy_rows(x, out, begin, end):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[i * x.shape[1] + j] = x[i, j]


@cpu_jit
def _copy_flat(x, out, begin, end):
    for i in range(x.shape[0]):
        out[i] = x[i]


# --- with a helper that makes calls while this thread notes others -----------------------------------


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(threads, "_num_threads", [2])


@cpu_jit
def _mix(x, factor, out, begin, end):
    """Takes from all items, so that a call that begins before the last one has ended is found."""
    size = x.shape[0]
    for i in range(begin, end):
        out[i] = x[i] * factor + x[(i * 7 + 3) % size]


def mixed(x, factors, grain, *, settles=()):
    for i, factor in enumerate(factors):
        out = torch.empty_like(x)
        _mix.parallel_for(len(x), grain, x, factor, out)
        x = out
        if i in settles:
            settle()
    return x


@pytest.mark.usefixtures("two_threads")
def test_a_helper_makes_calls_in_order_meanwhile():
    rng = random.Random(3)
    for turn in range(300):
        x = torch.arange(1, 1 + rng.choice((1, 5, 300, 5000)), dtype=torch.int64)
        factors = [rng.randrange(1, 9) for _ in range(rng.randrange(1, 45))]
        grain, settles = rng.choice((1, 50, 1000, 10**6)), set(rng.sample(range(45), 3))
        expected = mixed(x, factors, 10**9)
        with cpu_threads().awake() as has_helpers, batched_calls():
            assert has_helpers
            found = mixed(x, factors, grain, settles=settles)
        assert torch.equal(found, expected), turn


def begins_early() -> bool:
    """Whether a helper makes a call before its batch is complete. One that has lost its core does not."""
    sums, until = torch.zeros(3), time.monotonic() + 0.1
    with cpu_threads().awake(), batched_calls():
        note(sums, 1)
        while sums.numpy()[0] != 1 and time.monotonic() < until:
            pass
        begins = sums.numpy()[0] == 1
        note(sums, 2)
    assert sums.tolist() == [12, 12, 12]
    return bool(begins)


@pytest.mark.usefixtures("two_threads")
def test_a_helper_begins_before_the_batch_is_complete():
    wait_until(begins_early, "a helper makes a call")


@pytest.mark.usefixtures("two_threads")
def test_after_a_failure_no_helper_makes_its_calls(sums):
    def fail():
        with cpu_threads().awake(), batched_calls():
            note(sums, 1, 1, 1)
            raise ValueError("midway")

    for _ in range(50):
        sums.zero_()
        with pytest.raises(ValueError, match="midway"):
            fail()
        left = sums.clone()
        with cpu_threads().awake(), batched_calls():
            note(torch.zeros(3), 5)
        assert torch.equal(sums, left)


@pytest.mark.usefixtures("two_threads")
def test_batches_of_several_threads_do_not_mix():
    x = torch.arange(1, 300, dtype=torch.int64)
    factors = [3, 1, 4, 1, 5, 9, 2, 6] * 4
    expected = mixed(x, factors, 10**9)
    different = []

    def work():
        for _ in range(60):
            with cpu_threads().awake(), batched_calls():
                found = mixed(x, factors, 20)
            if not torch.equal(found, expected):
                different.append(found)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert different == []
