"""How a process steps back behind all others of its machine."""

from __future__ import annotations

import os

MAX_NICENESS = 19


def run_when_idle() -> None:
    """Lets this process have only the processor time that nobody else wants.

    Niceness alone is a weight: sixteen processes at 19 get as much as two threads at 10.
    """
    os.nice(MAX_NICENESS)
    if hasattr(os, "SCHED_IDLE"):  # Linux's
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
