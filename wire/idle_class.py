"""Gives a process lower priority than all others on its machine."""

from __future__ import annotations

import os

MAX_NICENESS = 19


def run_when_idle() -> None:
    """Restricts this process to processor time that no other process wants.

    Niceness alone is only a weight: sixteen processes of niceness 19 get as much time as two threads of
    niceness 10.
    """
    os.nice(MAX_NICENESS)
    if hasattr(os, "SCHED_IDLE"):  # Linux only
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
