"""Requests in flight and the last ones that have ended."""

from __future__ import annotations

from collections import deque
from itertools import islice

import orjson

from router.observe.request_record import RequestRecord
from wire.errors import OverloadedError, TwinfangError

MAX_ENDED = 512
"""Maximum number of ended requests that are kept. Each takes about a kilobyte for each of its choices."""
MAX_ENDED_BYTES = 4 << 20
"""Maximum size of all kept requests together. This limit is needed because a single request may have as many
choices as the router allows."""


class RequestLog:
    """Knows every checked request until the request ends, and keeps it for a while after that."""

    def __init__(self) -> None:
        self._in_flight: dict[str, RequestRecord] = {}
        self._ended: deque[bytes] = deque()
        """Ended requests as :meth:`RequestRecord.packed` returns them, the newest last."""
        self.num_ended = 0
        """Number of requests that have ended since the start, including those that are no longer kept."""
        self._num_ended_bytes = 0

    @property
    def num_queued(self) -> int:
        """Requests that wait to be let in."""
        return sum(record.admitted_s is None for record in self._in_flight.values())

    @property
    def num_in_flight(self) -> int:
        """Requests that were let in and have not ended."""
        return len(self._in_flight) - self.num_queued

    def began(self, record: RequestRecord) -> None:
        """Keep the request in flight until :meth:`ended`."""
        first_id, n = record.id, 1
        while record.id in self._in_flight:  # clients choose ids, and may choose one twice
            n += 1
            record.id = f"{first_id}~{n}"
        self._in_flight[record.id] = record

    def ended(self, record: RequestRecord, error: BaseException | None) -> None:
        """Note the end of a request in flight. A request that ends with :class:`OverloadedError` is not kept
        after its end."""
        del self._in_flight[record.id]
        record.ended(error)
        if not isinstance(error, OverloadedError):
            self._keep(record)

    def find(self, request_id: str) -> RequestRecord | None:
        """Return the request in flight with this id. If there is none, return the last ended request with
        this id."""
        if (found := self._in_flight.get(request_id)) is not None:
            return found
        begins = b"[%b," % orjson.dumps(request_id)
        packed = next((one for one in reversed(self._ended) if one.startswith(begins)), None)
        return None if packed is None else RequestRecord.unpacked(packed)

    def newest(self, limit: int) -> list[RequestRecord]:
        """Return requests in flight, then requests that have ended. Both parts begin with the newest
        request."""
        in_flight = list(islice(reversed(self._in_flight.values()), limit))
        return in_flight + self.last_ended(limit - len(in_flight))

    def in_flight(self) -> list[RequestRecord]:
        return list(self._in_flight.values())

    def abort_all(self, error: TwinfangError) -> None:
        """End all requests in flight with ``error``."""
        for record in self.in_flight():
            record.abort(error)

    def last_ended(self, limit: int) -> list[RequestRecord]:
        """Return the requests that ended last, the newest first."""
        return list(map(RequestRecord.unpacked, islice(reversed(self._ended), limit)))

    def _keep(self, record: RequestRecord) -> None:
        packed = record.packed()
        self._ended.append(packed)
        self.num_ended += 1
        self._num_ended_bytes += len(packed)
        while len(self._ended) > MAX_ENDED or self._num_ended_bytes > MAX_ENDED_BYTES:
            self._num_ended_bytes -= len(self._ended.popleft())
