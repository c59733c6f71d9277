"""Compute threads have a lower priority than other processes."""

import os
import sys
import threading
import time

import pytest
import torch

from engine import priority
from engine.loop import EngineLoop
from engine.priority import Pace, lower_priority
from engine.step.burst import Bursts
from engine.step_result import StepResult
from kernels.cpu import shared_cores
from kernels.cpu.threads import CpuThreads, cpu_threads
from testing.conditions import wait_until
from wire.messages.generation import StepOutputs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="niceness of single threads")


def niceness_in_a_thread_after(action):
    told = []

    def run():
        action()
        told.append(os.getpriority(os.PRIO_PROCESS, 0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return told[0]


def test_only_the_thread_that_asks_and_the_kernels_helpers_step_back():
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert niceness_in_a_thread_after(lambda: lower_priority(before + 5)) == before + 5
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    for helper in cpu_threads().helper_ids:
        assert os.getpriority(os.PRIO_PROCESS, helper) == before + 5


def test_niceness_zero_leaves_what_a_process_was_started_with():
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert niceness_in_a_thread_after(lambda: lower_priority(0)) == before


@pytest.fixture
def pace(monkeypatch):
    """That of a decode server, while a prefill server of its stack computes; a token takes a minute."""
    monkeypatch.setattr(shared_cores, "_kept", [])
    shared_cores.share_cores()
    mine = CpuThreads()
    monkeypatch.setattr(priority, "cpu_threads", lambda: mine)
    monkeypatch.setattr(priority, "TOKEN_S", 60.0)
    monkeypatch.setattr(shared_cores, "_AT_MOST_NS", 10**12)
    if (child := os.fork()) == 0:
        mine.shared_cores.compute(2)
        os._exit(0)
    os.waitpid(child, 0)
    mine.shared_cores.lower_priority(5)
    return Pace()


def tokens(number):
    return StepOutputs({"one": (7,) * number, "other": (7,)})


def test_steps_rest_while_prompts_are_computed_until_an_event_comes(pace):
    assert not pace.rests
    pace.stepped(time.monotonic(), tokens(1))
    assert pace.rests
    pace.hurry()
    assert not pace.rests


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, False), (2, True)])
def test_a_burst_of_steps_rests_for_each_of_its_tokens(pace, num_tokens, expected):
    pace.stepped(time.monotonic() - 61, tokens(num_tokens))
    assert pace.rests == expected


def test_a_step_without_tokens_is_followed_at_once(pace):
    pace.stepped(time.monotonic(), StepOutputs({}))
    assert not pace.rests


def test_nothing_rests_when_nobody_else_computes(pace, monkeypatch):
    pace.stepped(time.monotonic(), tokens(1))
    later_ns = time.monotonic_ns() + 2 * 10**12
    monkeypatch.setattr(time, "monotonic_ns", lambda: later_ns)
    assert not pace.rests


class Decoding:
    """An engine whose steps give tokens."""

    device, bursts = torch.device("cpu"), Bursts(0.0)

    class config:
        niceness = 0

    def __init__(self):
        self.num_steps = 0

    def step(self):
        self.num_steps += 1
        return StepResult(tokens(1))


def test_the_engines_thread_makes_one_step_for_each_event_while_it_rests(pace):
    engine, faults = Decoding(), []
    loop = EngineLoop(engine, on_step=lambda result: None, on_fatal=faults.append)
    loop.start()
    for num_events in (1, 2, 3):
        loop.post(lambda: None)
        wait_until(lambda expected=num_events: engine.num_steps >= expected)
    loop.stop()
    assert (engine.num_steps, faults) == (3, [])
