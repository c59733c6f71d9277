"""The transfer thread: alone touches NIXL, polls only while something can happen, else blocks."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 10.0


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
