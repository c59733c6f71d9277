"""The last thing a process does."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import time
from typing import NoReturn

log = logging.getLogger(__name__)

FAULT_EXIT_CODE = 70
"""Exit code of a process that a bug has ended."""
DEVICE_FAULT_EXIT_CODE = 71
"""Exit code of a process whose GPU has failed, or hangs. A supervisor starts such a process again."""


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


def leave_at_once(code: int) -> NoReturn:
    """End the process and the processes that it has started, and wait for none of its threads.

    For a process whose GPU has failed. Exit handlers and destructors would call the GPU, which may never
    answer. The ranks that this process has started are killed, because a new process needs their memory.
    """
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def leave_within(grace_s: float, code: int) -> None:
    """Return at once, and end the process after ``grace_s`` unless it has ended by itself before."""

    def leave() -> None:
        time.sleep(grace_s)
        log.critical("no clean stop within %g s; ending", grace_s)
        leave_at_once(code)

    threading.Thread(target=leave, name="end", daemon=True).start()
