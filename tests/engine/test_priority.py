"""Compute threads have a lower priority than other processes."""

import os
import sys
import threading

import pytest

from engine.priority import lower_priority
from kernels.cpu.threads import cpu_threads

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
