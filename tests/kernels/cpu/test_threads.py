"""Helper threads: who gets them, when a call is shared with them, and which kernel a shared call runs."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from kernels.cpu import jit, shared_cores, threads
from kernels.cpu.atomics import add_to_word, load_word
from kernels.cpu.jit import cpu_jit
from kernels.cpu.threads import cpu_threads
from testing.conditions import wait_until

PATIENCE = 2**23
"""How often an item looks for the other one: for some milliseconds, in which a helper wakes. A helper that
lost its core is unused for longer: then the call is made again."""


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    monkeypatch.setattr(threads, "_num_threads", [2])


@cpu_jit
def _meet(words, met, patience, begin, end):
    """Each of two items waits until the other one runs too."""
    for item in range(begin, end):
        add_to_word(words.ctypes.data, 1)
        for _ in range(patience):
            if load_word(words.ctypes.data) == 2:
                met[item] = 1
                break


def both_meet(grain: int) -> bool:
    """Returns whether two threads share a call of two items."""
    words, met = np.zeros(1, dtype=np.int64), np.zeros(2, dtype=np.int64)
    _meet.parallel_for(2, grain, words, met, PATIENCE)
    return bool(met.all())


def meet_at_last(grain: int) -> None:
    wait_until(lambda: both_meet(grain), "a helper takes a share")


def test_a_long_call_is_shared():
    meet_at_last(1)


def test_a_shorter_call_is_shared_only_while_the_helpers_are_awake():
    assert not both_meet(2)
    with cpu_threads().awake() as has_helpers:
        assert has_helpers
        meet_at_last(2)
        meet_at_last(2)
        assert not both_meet(3)
    assert not both_meet(2)


def test_helpers_belong_to_one_thread_at_a_time():
    mine, found = cpu_threads(), []

    def ask() -> None:
        with mine.awake() as has_helpers:
            found.append((has_helpers, mine.are_awake, both_meet(1)))

    with mine.awake(), mine.awake() as has_them_again:
        assert has_them_again
        assert mine.are_awake
        other = threading.Thread(target=ask)
        other.start()
        other.join()
        meet_at_last(2)
    assert not mine.are_awake
    assert found == [(False, False, False)]


def test_one_thread_has_no_helpers(monkeypatch):
    monkeypatch.setattr(threads, "_num_threads", [1])
    with cpu_threads().awake() as has_helpers:
        assert not has_helpers
        assert not both_meet(1)


@cpu_jit
def _scaled_sums(x, scales, out, begin, end):
    first, second = scales
    for i in range(begin, end):
        total = 0.0
        for j in range(x.shape[1]):
            total += x[i, j]
        out[i] = total * first + second


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("scales", [(2, 1), (np.float32(0.5), 1), (0.5, np.int32(3))], ids=str)
def test_a_shared_call_runs_the_kernel_for_its_arguments_types(scales):
    wide = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    arrays = wide, wide.T, wide[:, ::2], read_only(wide), wide.astype(np.float64), wide.astype(np.int64)
    for x in (*arrays, *arrays):
        out = np.zeros(8)
        _scaled_sums.parallel_for(8, 1, x, scales, out)
        np.testing.assert_array_equal(out, x.sum(axis=1) * float(scales[0]) + scales[1])


def test_short_calls_are_not_shared_while_other_servers_want_the_cores(monkeypatch):
    monkeypatch.setattr(shared_cores, "_kept", [])
    shared_cores.share_cores()
    mine = threads.CpuThreads()
    monkeypatch.setattr(threads, "cpu_threads", lambda: mine)
    monkeypatch.setattr(jit, "cpu_threads", lambda: mine)
    meet_at_last(1)
    if (child := os.fork()) == 0:
        shared_cores.shared_cores().compute(2)
        os._exit(0)
    os.waitpid(child, 0)
    assert not both_meet(1)
    meet_at_last(1)  # a second later
