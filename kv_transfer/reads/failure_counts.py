"""How often a ticket's state did not arrive, by cause."""

from __future__ import annotations

import threading
from typing import get_args

from wire.errors import DeadlineError, TransferError, TransferFailure, TwinfangError, UnavailableError


class FailureCounts:
    """Counts since the start. Thread-safe: handshakes fail on the event loop, reads on other threads."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = dict.fromkeys(get_args(TransferFailure), 0)
        self._lock = threading.Lock()

    def add(self, cause: TransferFailure) -> None:
        with self._lock:
            self._counts[cause] += 1

    def count(self, error: TwinfangError) -> None:
        """Adds one under the error's cause."""
        self.add(cause_of(error))

    def counts(self) -> dict[str, int]:
        """Returns the counts by cause, including causes that never occurred."""
        with self._lock:
            return dict(self._counts)


def cause_of(error: TwinfangError) -> TransferFailure:
    """Returns why a handshake or a read failed with this error."""
    if isinstance(error, TransferError):
        return error.cause
    if isinstance(error, DeadlineError):
        return "deadline"
    # A peer that can't be called is gone; a peer that answers with any other error refuses.
    return "peer_gone" if isinstance(error, UnavailableError) else "handshake_refused"
