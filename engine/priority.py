"""The priority of this process's compute threads among other threads that want the same cores."""

from __future__ import annotations

import logging
import os
import sys
import threading

from kernels.cpu.threads import cpu_threads

log = logging.getLogger(__name__)


def lower_priority(niceness: int) -> None:
    """Sets the niceness of the calling thread and of the CPU kernels' helper threads; 0 changes nothing.

    Only compute threads get a lower priority. The threads that answer (event loop, gRPC, transfers) keep
    theirs: a token should leave as soon as it exists.
    """
    if niceness == 0:
        return
    if sys.platform != "linux":  # elsewhere a thread has no niceness of its own
        log.warning("`niceness` %d: only Linux gives threads a niceness of their own; it stays 0", niceness)
        return
    for thread_id in (threading.get_native_id(), *cpu_threads().helper_ids):
        os.setpriority(os.PRIO_PROCESS, thread_id, niceness)
