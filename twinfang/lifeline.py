"""A pipe by which a child learns that its supervisor is gone, however that ended.

The supervisor holds the only writing end. When the supervisor ends, by SIGKILL too, the kernel closes that
end and the child's read returns. Unlike ``PR_SET_PDEATHSIG`` that has no race at start and needs no Linux.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

log = logging.getLogger(__name__)

STOP_GRACE_S = 20.0
"""What a clean stop may take before the process is ended as it is."""


def watch_lifeline(fd: int) -> None:
    """Stops this process once the pipe's other end is closed; returns at once."""
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
