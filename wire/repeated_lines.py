"""Log lines that may come by the hundred: after the first line of a kind, lines are only counted.

    request 5f… : no_server_available: …                        the first of a kind, at once
    no_server_available: 214 more in the last 5 s; …            the count of further lines, while more come

At level debug each line is written, with its request's id.
"""

from __future__ import annotations

import atexit
import logging
import threading
from dataclasses import dataclass

INTERVAL_S = 5.0
MAX_KINDS = 1000
"""Maximum number of kinds remembered in one interval. Lines of all further kinds count as one kind."""
OTHERS = "other kinds"


@dataclass
class _Kind:
    level: int
    num_more: int = 0


class RepeatedLines:
    """The repeated lines of one logger. May be used from any thread.

    A separate thread writes the counts, since most threads that log have no event loop. It runs from a kind's
    first line until an interval passes without further lines.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._kinds: dict[str, _Kind] = {}
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._is_closed = False
        atexit.register(self._close)

    def write(self, level: int, kind: str, message: str, *args: object) -> None:
        """Writes a line at ``level`` if it is the first of its kind for a while, else at level debug."""
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
        """Writes how many more lines of each kind came, and forgets the kinds without further lines."""
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
            self._timer.daemon = True  # a process that ends need not wait for it: _close writes the counts
            self._timer.start()
