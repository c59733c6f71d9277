"""Servers that were forked from one process leave one another the cores while they compute."""

from __future__ import annotations

import os
import time

import pytest

from kernels.cpu import shared_cores as module
from kernels.cpu.atomics import c_function
from kernels.cpu.shared_cores import SharedCores, are_cores_wanted, share_cores, shared_cores


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(module, "_kept", [])
    share_cores()
    return shared_cores()


def wanted(one: SharedCores) -> bool:
    return bool(are_cores_wanted.dispatcher(one.address, c_function("clock_gettime")))


def in_a_child(action) -> None:
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_without_a_page_nobody_wants_anything(monkeypatch):
    monkeypatch.setattr(module, "_kept", [])
    alone = shared_cores()
    alone.compute(num_threads=2)
    alone.rest()
    assert not wanted(alone)


def test_a_process_does_not_wait_for_itself(here):
    here.compute(num_threads=2)
    assert not wanted(here)
    assert not here.comes_second


@pytest.mark.parametrize(
    ("num_threads", "others", "expected"), [(2, 1, True), (3, 1, True), (4, 1, False), (4, 2, True)]
)
def test_cores_are_wanted_if_a_fair_share_of_the_threads_is_one(here, num_threads, others, expected):
    for _ in range(others):
        in_a_child(lambda: here.compute(num_threads))
    here.compute(num_threads)
    assert wanted(here) == expected


@pytest.mark.parametrize(
    ("last", "milliseconds_ago", "expected"),
    [("compute", 0, True), ("compute", 1100, False), ("rest", 10, False)],
    ids=["computes", "was killed", "has rested"],
)
def test_they_are_wanted_until_the_other_has_rested_or_seems_to_be_dead(
    here, monkeypatch, last, milliseconds_ago, expected
):
    here.compute(num_threads=2)
    then_ns = time.monotonic_ns() - milliseconds_ago * 1_000_000
    monkeypatch.setattr(time, "monotonic_ns", lambda: then_ns)
    in_a_child(lambda: here.compute(2) if last == "compute" else here.rest())
    assert wanted(here) == expected


@pytest.mark.parametrize("own", [0, 5, 10])
@pytest.mark.parametrize("other", [0, 5, 10])
def test_a_server_ignores_those_with_a_higher_niceness(here, own, other):
    def compute_at(niceness):
        here.lower_priority(niceness)
        here.compute(num_threads=2)

    in_a_child(lambda: compute_at(other))
    compute_at(own)
    assert wanted(here) == (other <= own)
    assert here.comes_second == (other < own)


def test_a_server_comes_second_until_the_other_has_rested(here, monkeypatch):
    assert not SharedCores(shares_page=False).comes_second
    in_a_child(lambda: here.compute(2))
    here.lower_priority(5)
    assert here.comes_second
    later_ns = time.monotonic_ns() + 1_100_000_000
    monkeypatch.setattr(time, "monotonic_ns", lambda: later_ns)
    assert not here.comes_second


def test_more_processes_than_places_share_them(here):
    for _ in range(module.MOST_SERVERS + 3):
        in_a_child(lambda: here.compute(2))
    assert wanted(here)
