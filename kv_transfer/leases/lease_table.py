"""Leases with a time to live, and the epochs that make late reads harmless.

Each lease has a cell in a table of epochs that readers can see. Ending a lease increments its cell, and only
then may the leased memory be reused. A reader reads the cell after the data. If the cell has changed, the
data may be another request's and the reader discards it (a seqlock with one writer). A late read can be slow;
it can't be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Lease:
    """A promise to keep one request's blocks and slot unchanged until ``expires_at``."""

    lease_id: int
    epoch: int
    request_id: str
    expires_at: float


class LeaseTable:
    """The leases of one lending server. ``epochs`` is the table's memory, int64, one cell per lease."""

    def __init__(
        self, epochs: NDArray[np.int64], *, ttl_s: float, clock: Callable[[], float], first_id: int = 0
    ) -> None:
        """``first_id`` is the id of the lease in the first cell."""
        self._epochs = epochs
        self._ttl_s = ttl_s
        self._clock = clock
        self._first_id = first_id
        self._free = list(range(first_id + len(epochs) - 1, first_id - 1, -1))
        self._leases: dict[int, Lease] = {}  # the soonest to expire comes first
        self._open: dict[int, Lease] = {}  # leases of prompts that are still computed; they do not expire

    def __len__(self) -> int:
        return len(self._leases) + len(self._open)

    def grant(self, request_id: str) -> Lease:
        """Returns a new lease. Running out of cells is a bug: there is a cell for every request that
        can be held."""
        lease = self._take(request_id, self._clock() + self._ttl_s)
        self._leases[lease.lease_id] = lease
        return lease

    def open(self, request_id: str) -> Lease:
        """Returns a new lease that can't expire until :meth:`settle` is called. :meth:`end` ends it at any
        time."""
        lease = self._take(request_id, math.inf)
        self._open[lease.lease_id] = lease
        return lease

    def settle(self, lease_id: int, epoch: int) -> bool:
        """Starts an open lease's time to live; False if the lease has already ended."""
        lease = self._open.get(lease_id)
        if lease is None or lease.epoch != epoch:
            return False
        del self._open[lease_id]
        self._leases[lease_id] = replace(lease, expires_at=self._clock() + self._ttl_s)
        return True

    def _take(self, request_id: str, expires_at: float) -> Lease:
        if not self._free:
            raise RuntimeError(f"all {len(self._epochs)} leases are taken")
        lease_id = self._free.pop()
        return Lease(lease_id, int(self._epochs[lease_id - self._first_id]), request_id, expires_at)

    def end(self, lease_id: int, epoch: int) -> Lease | None:
        """Ends a lease and increments its cell. Returns None if the lease has already ended: then the message
        that asked for the end came late or twice."""
        lease = self._find(lease_id)
        if lease is None or lease.epoch != epoch:
            return None
        self._epochs[lease_id - self._first_id] = epoch + 1
        self._leases.pop(lease_id, None)
        self._open.pop(lease_id, None)
        self._free.append(lease_id)
        return lease

    def renew(self, lease_id: int, epoch: int) -> bool:
        """Restarts a lease's time to live; False if the lease has already ended."""
        lease = self._find(lease_id)
        if lease is None or lease.epoch != epoch:
            return False
        if lease_id in self._open:
            return True
        del self._leases[lease_id]  # inserted again at the end, as the last one to expire
        self._leases[lease_id] = replace(lease, expires_at=self._clock() + self._ttl_s)
        return True

    def _find(self, lease_id: int) -> Lease | None:
        return self._leases.get(lease_id) or self._open.get(lease_id)

    def end_expired(self) -> list[Lease]:
        """Ends and returns all leases whose time to live is over."""
        now = self._clock()
        expired: list[Lease] = []
        for lease in self._leases.values():
            if lease.expires_at > now:
                break
            expired.append(lease)
        for lease in expired:
            self.end(lease.lease_id, lease.epoch)
        return expired
