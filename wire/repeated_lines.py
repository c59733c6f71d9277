"""Lines of a log that may come by the hundred, counted instead of written.

    request 5f… : no_server_available: …                        the first of a kind, at once
    no_server_available: 214 more in the last 5 s; …            what followed, as long as more follow

Each one is a line at level debug, with its request's id.
"""

from __future__ import annotations

import atexit
import logging
import threading
from dataclasses import dataclass

INTERVAL_S = 5.0
MAX_KINDS = 1000
"""That are remembered for one interval; lines of further kinds count as one kind."""
OTHERS = "other kinds"


@dataclass
class _Kind:
    level: int
    num_more: int = 0


class RepeatedLines:
    """Of one logger. May be used from any thread.

    The count is written by a thread of its own, as most threads that log have no event loop. It lives from a
    kind's first line until nothing has followed for an interval.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._kinds: dict[str, _Kind] = {}
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._is_closed = False
        atexit.register(self._close)

    def write(self, level: int, kind: str, message: str, *args: object) -> None:
        """A line as ``log`` writes it, if it is the first of its kind for a while."""
        with self._lock:
            known = self._kinds.get(kind)
            if known is None and len(self._kinds) >= MAX_KINDS:
                kind = OTHERS
                known = self._kinds.get(kind)
            if known is None:
                self._kinds[kind] = _Kind(level)
                self._wait()
            else:
                known.num_more += 1
                level = logging.DEBUG
        self._log.log(level, message, *args)

    def tell(self) -> None:
        """Writes how many more came of each kind, and forgets kinds of which none did."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            told = {name: kind for name, kind in self._kinds.items() if kind.num_more}
            self._kinds = {name: _Kind(kind.level) for name, kind in told.items()}
            if told:
                self._wait()
        for name, kind in told.items():
            self._log.log(
                kind.level,
                "%s: %d more in the last %g s; `log_level` debug shows each",
                *(name, kind.num_more, INTERVAL_S),
            )

    def _close(self) -> None:
        self._is_closed = True
        self.tell()

    def _wait(self) -> None:
        if self._timer is None and not self._is_closed:
            self._timer = threading.Timer(INTERVAL_S, self.tell)
            self._timer.daemon = True  # else a process that ends would wait for it; it tells at its end
            self._timer.start()
