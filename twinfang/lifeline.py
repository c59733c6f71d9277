"""A pipe by which a child notices that its supervisor has ended, for whatever reason.

Only the supervisor holds the writing end. When the supervisor ends, even by SIGKILL, the operating system
closes this end, and the child's read returns. Unlike ``PR_SET_PDEATHSIG``, a pipe has no race at start and
does not need Linux.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

log = logging.getLogger(__name__)

STOP_GRACE_S = 20.0
"""The time that a clean stop may take. After it, the process ends at once."""


def watch_lifeline(fd: int) -> None:
    """Starts a thread that stops this process once the pipe's other end is closed. Returns at once."""
    threading.Thread(target=_watch, args=(fd,), name="lifeline", daemon=True).start()


def _watch(fd: int) -> None:
    try:
        while os.read(fd, 1):
            pass
    except OSError as error:
        log.error("the pipe to the supervisor can't be read: %s", error)
    log.warning("the supervisor is gone; stopping")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_GRACE_S)
    log.error("no clean stop within %s s; ending", STOP_GRACE_S)
    os._exit(1)
