"""A ``twinfang`` whose servers have the faults of :mod:`testing.fleets.injected`. Above all, a test can slow
its decode servers down: ``python -m testing.fleets.slowed up …``.

An answer's duration depends on the machine's speed. A test that disturbs running answers slows them down, so
that they last long enough on any machine (:meth:`testing.fleets.stack.Stack.slow_steps`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from testing.fleets.fault_folder import FOLDER_VARIABLE
from twinfang.__main__ import run
from twinfang.commands.before_torch import prepare_libraries
from twinfang.stack import child

MODULE = "testing.fleets.slowed"


def prepare(command: str) -> None:
    """Prepares a process: a stack starts its processes with this module too, and servers get faults that can
    be switched on."""
    if command in ("up", "serve"):
        child.PROGRAM = (sys.executable, "-m", MODULE)
    elif command in ("prefill", "decode"):
        prepare_libraries()  # before torch is imported, as in any server
        from testing.fleets.injected import inject  # here: a router must not import the engine

        inject(Path(os.environ[FOLDER_VARIABLE]))


if __name__ == "__main__":
    prepare(sys.argv[1])
    run()
