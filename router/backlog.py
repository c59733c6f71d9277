"""What waits in the router's memory for clients to take it, of all requests together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from router.inbox import Inbox

log = logging.getLogger(__name__)

MAX_WEIGHT = 1 << 20
"""Some 110 MB: a log-probability that waits is three Python objects."""


class Backlog:
    """Bounds the sum of all inboxes by ending the request that has the most in its own.

    Log-probabilities come as fast as servers compute them, whether the client takes them or not: hundreds of
    megabytes in the minute after which a client that takes nothing is given up.
    """

    def __init__(self, max_weight: int = MAX_WEIGHT) -> None:
        self._max_weight = max_weight
        self._owners: dict[Inbox[Any], Callable[[], None]] = {}
        self.weight = 0

    @contextmanager
    def of(self, inbox: Inbox[Any], end: Callable[[], None]) -> Iterator[None]:
        """The life of an inbox, which tells :meth:`changed` its weight; ``end`` closes it before its time."""
        self._owners[inbox] = end
        try:
            yield
        finally:
            del self._owners[inbox]
            inbox.close()

    def changed(self, weight: int) -> None:
        self.weight += weight
        if weight > 0 and self.weight > self._max_weight:
            self._end_heaviest()

    def _end_heaviest(self) -> None:
        heaviest = max(self._owners, key=lambda inbox: inbox.weight)
        log.warning("answers that clients have not taken weigh %d: the heaviest one ends", self.weight)
        self._owners[heaviest]()
