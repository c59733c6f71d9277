"""The transfer thread: alone touches NIXL, polls only while something can happen, else blocks.

It polls fast while news is likely, slower the longer nothing happens.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 10.0

SPIN_FOR_S = 150e-6
"""How long a read that was just posted is polled without a pause: a small one is over by then, and a pause
of 50 µs takes 120 on a busy machine."""
FAST_S = 50e-6
FAST_FOR_S = 5e-3
SLOW_S = 1e-3
"""Measured between two processes: at 1 ms a read whose target takes part (TCP, shared memory without
CMA) pays at most 1 ms more and keeps its bandwidth; a poll costs 4 to 40 µs."""

LATE_S = 0.1
"""Of a server where no read is expected, but one whose lease has run out may still be on its way, behind a
link that was cut or is slow: its destination stays in quarantine until it is answered."""
LATE_FOR_S = 120.0
"""How long that may be: UCX gives up a link that was cut after the read's deadline, some 40 s."""
IDLE_S = 1.0
"""Of a server where nothing is expected: peers that came or went are noticed."""


def poll_delay(quiet_s: float) -> float:
    """Seconds until the next poll, ``quiet_s`` after the last thing that happened."""
    return FAST_S if quiet_s < FAST_FOR_S else SLOW_S


def idle_delay(since_ended_s: float) -> float:
    """Seconds until the next poll where no read is expected, so long after one may have been cut off."""
    return LATE_S if since_ended_s < LATE_FOR_S else IDLE_S


def read_poll_delay(quiet_s: float) -> float:
    """The same where reads are under way."""
    return 0.0 if quiet_s < SPIN_FOR_S else poll_delay(quiet_s)


class PollThread:
    """Runs posted work in order, and between that ``poll``.

    ``poll`` returns after how many seconds it wants to be called again, or None if nothing can happen before
    new work is posted. NIXL runs without a progress thread of its own (measured: it costs 5 % of a core
    when idle), so this is what moves its transfers on.

    An exception that escapes is a fault of ours: ``on_fatal`` gets it, and the process is expected to end.
    """

    def __init__(
        self, name: str, poll: Callable[[], float | None], on_fatal: Callable[[BaseException], None]
    ) -> None:
        self._poll = poll
        self._on_fatal = on_fatal
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def post(self, work: Callable[[], None]) -> None:
        """Runs ``work`` on the thread. Thread-safe, returns at once."""
        self._work.put(work)

    def stop(self) -> None:
        """Ends the thread once work posted before is done."""
        self._work.put(None)
        self._thread.join(JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            log.error("the transfer thread did not end within %s s", JOIN_TIMEOUT_S)

    def _run(self) -> None:
        try:
            delay_s: float | None = None
            while self._work_for(delay_s):
                delay_s = self._poll()
        except BaseException as error:
            log.exception("the transfer thread failed")
            self._on_fatal(error)

    def _work_for(self, delay_s: float | None) -> bool:
        """Waits for work for ``delay_s`` seconds, then runs all there is. False: stop was asked for."""
        try:
            work = self._work.get(timeout=delay_s)
            while work is not None:
                work()
                work = self._work.get_nowait()
        except queue.Empty:
            return True
        return False
