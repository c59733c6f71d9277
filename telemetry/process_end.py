"""The last thing a process does."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """Ends the process without taking the interpreter apart.

    All that has to be closed in order is closed by then. To free each of torch's 200,000 objects takes two
    thirds of a second of a core and helps nobody: the kernel takes the memory back. On a busy machine it took
    ten seconds, and whoever waited for the process killed it.
    """
    atexit._run_exitfuncs()  # flushes logs, ends children of multiprocessing
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # whoever read it is gone
            code = code or 1
    os._exit(code)
