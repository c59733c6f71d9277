"""Gives a process lower priority than others on its machine."""

from __future__ import annotations

import os

MAX_NICENESS = 19
LOW_NICENESS = 10
"""A process with it gets a tenth of what a thread with niceness 0 gets, where both want a processor. With
niceness 19 it would get a seventieth."""


def run_behind_others() -> None:
    """Gives this process niceness 10, for one process with little work that answers wait for.

    With niceness 19, answers waited 20 s on a busy machine for masks that take 0.2 s. Many processes with
    niceness 10 would take much of a processor.
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(LOW_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))


def run_when_idle() -> None:
    """Restricts this process to processor time that no other process wants.

    Niceness alone is only a weight: sixteen processes of niceness 19 get as much time as two threads of
    niceness 10.
    """
    os.nice(MAX_NICENESS)
    if hasattr(os, "SCHED_IDLE"):  # Linux only
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
