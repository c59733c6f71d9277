"""A thread that does not come back is noticed; one that works, waits for events or is frozen is not."""

import itertools
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time

import torch

from engine.loop import EngineLoop
from engine.step.burst import Bursts
from engine.watchdog import Watchdog
from testing.conditions import PROMPT_S, wait_until
from wire.errors import DeviceFaultError

DEADLINE_S = 0.4
FROZEN_S = 5 * DEADLINE_S


class Turns:
    """The turns that a watchdog reads, and how many it has read."""

    def __init__(self, numbers):
        self.numbers = iter(numbers)
        self.num_read = 0

    def __call__(self):
        self.num_read += 1
        return next(self.numbers)


def watch(numbers):
    turns, hung = Turns(numbers), threading.Event()
    watchdog = Watchdog(DEADLINE_S, turns, hung.set)
    watchdog.start()
    return watchdog, turns, hung


def test_a_turn_that_lasts_for_the_deadline_is_reported_once():
    watchdog, turns, hung = watch(itertools.repeat(7))
    assert hung.wait(PROMPT_S)
    watchdog.stop()
    assert turns.num_read == 5  # it sees the turn, then the deadline's four ticks


def test_turns_that_end_and_pauses_between_them_are_not_reported():
    busy, pauses = [1, 1, 1, 2, 2, 2], [None] * 12
    watchdog, turns, hung = watch(itertools.chain(busy, pauses, [3, 3], itertools.count(4)))
    wait_until(lambda: turns.num_read > 24)
    watchdog.stop()
    assert not hung.is_set()


def test_time_in_which_the_process_is_frozen_does_not_count():
    code = f"""
        import itertools, threading
        from engine.watchdog import Watchdog

        read = []
        def turn():
            read.append(7)
            print("tick", flush=True)
            return 7

        Watchdog({DEADLINE_S}, turn, lambda: print("hang after", len(read), flush=True)).start()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "tick\n"
    os.kill(process.pid, signal.SIGSTOP)
    until_s = time.monotonic() + FROZEN_S
    wait_until(lambda: time.monotonic() > until_s)
    os.kill(process.pid, signal.SIGCONT)
    said, _ = process.communicate(timeout=PROMPT_S)
    assert said.splitlines() == ["tick"] * 4 + ["hang after 5"]


class Engine:
    """An engine that does nothing until it is told to hang."""

    device = torch.device("cpu")
    bursts = Bursts(0.0)

    class config:
        niceness = 0

    def __init__(self):
        self.comes_back = threading.Event()

    def step(self):
        self.comes_back.wait()
        raise GroupEndedError


class GroupEndedError(Exception):
    pass


def test_a_step_that_hangs_ends_the_engine_with_one_line(caplog):
    faults = queue.SimpleQueue()
    engine = Engine()
    loop = EngineLoop(engine, on_step=lambda result: None, on_fatal=faults.put, step_deadline_s=DEADLINE_S)
    loop.start()
    assert faults.empty()  # nothing was posted yet, so the thread waits for an event
    loop.post(lambda: None)
    try:
        fault = faults.get(timeout=PROMPT_S)
        assert isinstance(fault, DeviceFaultError)
        assert "a step has not ended within `step_deadline_s` 0.4" in fault.message
        assert [record.getMessage() for record in caplog.records] == [fault.message]
    finally:
        engine.comes_back.set()
        assert isinstance(faults.get(timeout=PROMPT_S), GroupEndedError)
        loop.stop()


def test_a_turn_is_timed_while_it_lasts_and_a_wait_for_events_is_not():
    engine = Engine()
    loop = EngineLoop(engine, on_step=lambda result: None, on_fatal=lambda fault: None)
    loop.start()
    assert loop.turn_s == 0
    loop.post(lambda: None)
    wait_until(lambda: loop.turn_s > DEADLINE_S)
    engine.comes_back.set()
    wait_until(lambda: loop.turn_s == 0)
    loop.stop()


def test_an_event_that_hangs_is_noticed_too():
    faults = queue.SimpleQueue()
    comes_back = threading.Event()
    engine = Engine()
    engine.comes_back.set()
    loop = EngineLoop(engine, on_step=lambda result: None, on_fatal=faults.put, step_deadline_s=DEADLINE_S)
    loop.start()
    loop.post(comes_back.wait)
    try:
        assert isinstance(faults.get(timeout=PROMPT_S), DeviceFaultError)
    finally:
        comes_back.set()
        assert isinstance(faults.get(timeout=PROMPT_S), GroupEndedError)
        loop.stop()
