"""How many requests a router answers at one time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from wire.errors import OverloadedError


class Admission:
    """Counts requests in flight and refuses the one that is too many."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self.num_requests = 0

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Holds a place. Raises :class:`OverloadedError` (429) if there is none."""
        if self.num_requests >= self._max_requests:
            raise OverloadedError(
                f"{self.num_requests} requests are in flight, the limit is {self._max_requests}: "
                "send the request again a little later"
            )
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1
