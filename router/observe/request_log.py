"""Requests in flight and the last ones that have ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

from router.observe.request_record import RequestRecord
from wire.errors import OverloadedError, TwinfangError

MAX_ENDED = 512
"""Some hundred bytes each; a few kilobytes with many choices."""
MAX_CHOICES_KEPT = 4096
"""Of all requests that have ended: one may have as many choices as the router allows."""


class RequestLog:
    """Knows every request from its arrival to its end, and for a while after that."""

    def __init__(self) -> None:
        self._in_flight: dict[str, RequestRecord] = {}
        self._ended: deque[RequestRecord] = deque()
        self.num_ended = 0
        """Since the start, those that were forgotten since too."""
        self._num_choices_kept = 0

    @property
    def num_queued(self) -> int:
        """Requests that wait to be let in."""
        return sum(record.admitted_s is None for record in self._in_flight.values())

    @property
    def num_in_flight(self) -> int:
        """Requests that were let in and have not ended."""
        return len(self._in_flight) - self.num_queued

    @contextmanager
    def follow(self, record: RequestRecord) -> Iterator[None]:
        """The request lasts as long as the block. One that was not let in leaves no trace."""
        first_id, n = record.id, 1
        while record.id in self._in_flight:  # clients choose ids, and may choose one twice
            n += 1
            record.id = f"{first_id}~{n}"
        self._in_flight[record.id] = record
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            del self._in_flight[record.id]
            record.ended(error)
            if not isinstance(error, OverloadedError):
                self._keep(record)

    def find(self, request_id: str) -> RequestRecord | None:
        """The one in flight, else the last one of that id."""
        found = self._in_flight.get(request_id)
        return found or next((one for one in reversed(self._ended) if one.id == request_id), None)

    def newest(self, limit: int) -> list[RequestRecord]:
        """Those in flight, then those that have ended; of each the newest first."""
        in_flight = list(islice(reversed(self._in_flight.values()), limit))
        return in_flight + self.last_ended(limit - len(in_flight))

    def in_flight(self) -> list[RequestRecord]:
        return list(self._in_flight.values())

    def abort_all(self, error: TwinfangError) -> None:
        """Ends all that are in flight with ``error``."""
        for record in self.in_flight():
            record.abort(error)

    def last_ended(self, limit: int) -> list[RequestRecord]:
        """The newest first."""
        return list(islice(reversed(self._ended), limit))

    def _keep(self, record: RequestRecord) -> None:
        self._ended.append(record)
        self.num_ended += 1
        self._num_choices_kept += len(record.choices)
        while len(self._ended) > MAX_ENDED or self._num_choices_kept > MAX_CHOICES_KEPT:
            self._num_choices_kept -= len(self._ended.popleft().choices)
