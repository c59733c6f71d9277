"""How this process's compute threads rank among others that want the same cores."""

from __future__ import annotations

import logging
import os
import sys
import threading

from kernels.cpu.threads import cpu_threads

log = logging.getLogger(__name__)


def lower_priority(niceness: int) -> None:
    """Gives the calling thread and the CPU kernels' helpers this niceness; 0 changes nothing.

    Only threads that compute step back. Those that answer (event loop, gRPC, transfers) stay as they are: a
    token that exists should leave at once.
    """
    if niceness == 0:
        return
    if sys.platform != "linux":  # elsewhere a thread has no niceness of its own
        log.warning("`niceness` %d: only Linux gives threads a niceness of their own; it stays 0", niceness)
        return
    for thread_id in (threading.get_native_id(), *cpu_threads().helper_ids):
        os.setpriority(os.PRIO_PROCESS, thread_id, niceness)
