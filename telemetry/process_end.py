"""The last thing a process does."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """End the process without shutting down the interpreter.

    Everything that has to be closed in order is closed before this call. To free each of torch's 200,000
    objects would take two thirds of a second of processor time and help nobody, because the operating system
    takes the memory back anyway. On a busy machine this took ten seconds, and programs that waited for the
    process killed it.
    """
    atexit._run_exitfuncs()  # flushes logs, ends children of multiprocessing
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the reader of the stream is gone
            code = code or 1
    os._exit(code)
