"""A thread that polls NIXL.

It polls while something can happen, and blocks otherwise. It polls often while an event is likely, and less
often when nothing has happened for a while.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import torch

from engine.device_faults import reported
from kernels.gpu.current_device import use_device

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 10.0

SPIN_FOR_S = 150e-6
"""How long a read that was just posted is polled without a pause: a small read ends within that time, and a
pause of 50 µs takes 120 µs on a busy machine."""
FAST_S = 50e-6
FAST_FOR_S = 5e-3
SLOW_S = 1e-3
"""Measured between two processes: if the lending process must take part in a read (TCP, shared memory without
CMA) and polls every 1 ms, the read takes at most 1 ms longer and keeps its bandwidth. A poll costs 4 to 40
µs."""

LATE_S = 0.1
"""Pause between the polls of a server that expects no read, while a read whose lease has expired may still
arrive over a cut or slow link. The read's destination stays in quarantine until the read is answered."""
LATE_FOR_S = 120.0
"""How long such a read may take: UCX gives up a cut link after the read's deadline, some 40 s."""
IDLE_S = 1.0
"""Pause between the polls of a server that expects nothing. It still notices peers that come or go."""


def poll_delay(quiet_s: float) -> float:
    """Returns the seconds until the next poll, ``quiet_s`` after the last event."""
    return FAST_S if quiet_s < FAST_FOR_S else SLOW_S


def idle_delay(since_ended_s: float) -> float:
    """Like :func:`poll_delay`, for a time when no read is expected.

    ``since_ended_s`` is the time since the last event that may have cut off a read, such as a lease's end.
    """
    return LATE_S if since_ended_s < LATE_FOR_S else IDLE_S


def read_poll_delay(quiet_s: float) -> float:
    """Like :func:`poll_delay`, while reads are under way."""
    return 0.0 if quiet_s < SPIN_FOR_S else poll_delay(quiet_s)


class PollThread:
    """Runs posted work in order, and calls ``poll`` in between, from :meth:`start` until :meth:`stop`.

    ``poll`` returns the seconds until its next call, or None if nothing can happen before new work is posted.
    NIXL runs without its own progress thread (measured: that costs 5 % of a core when idle), so only these
    polls make its transfers progress. The thread makes ``device`` current first: UCX looks for a CUDA context
    on the thread that connects to a peer and reads from it.

    An exception that escapes is a fault of the device or a bug. ``on_fatal`` gets it, and the process is
    expected to end.
    """

    def __init__(self, name: str, device: torch.device, on_fatal: Callable[[BaseException], None]) -> None:
        self._device = device
        self._on_fatal = on_fatal
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name)
        self._poll: Callable[[], float | None] = lambda: None

    def start(self, poll: Callable[[], float | None]) -> None:
        self._poll = poll
        self._thread.start()

    def post(self, work: Callable[[], None]) -> None:
        """Asks the thread to run ``work``, and returns at once. Thread-safe."""
        self._work.put(work)

    def stop(self) -> None:
        """Ends the thread once all work posted earlier is done."""
        self._work.put(None)
        self._thread.join(JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            log.error("the %s thread did not end within %s s", self._thread.name, JOIN_TIMEOUT_S)

    def _run(self) -> None:
        try:
            use_device(self._device)
            delay_s: float | None = None
            while self._work_for(delay_s):
                delay_s = self._poll()
        except BaseException as error:
            self._on_fatal(reported(error, f"the {self._thread.name} thread"))

    def _work_for(self, delay_s: float | None) -> bool:
        """Waits up to ``delay_s`` seconds for work, then runs all of it. Returns False after :meth:`stop`."""
        try:
            work = self._work.get(timeout=delay_s)
            while work is not None:
                work()
                work = self._work.get_nowait()
        except queue.Empty:
            return True
        return False
