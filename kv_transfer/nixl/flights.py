"""Reads under way, for any purpose. Used on the transfer thread.

A late read is reported and stays under way: its bytes may land until NIXL says that the read has ended, since
a frozen peer may run again. Until then, the caller that posted the read keeps its destination in quarantine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.nixl.agent import PreparedList, Read, TransferAgent
from kv_transfer.nixl.descriptors import Share
from kv_transfer.nixl.poll_thread import FAST_S, read_poll_delay
from wire.errors import TransferError
from wire.messages.handoff import RankMemory


@dataclass(frozen=True)
class PeerMemory:
    """One rank of one incarnation of a server whose memory can be read, with its name in NIXL."""

    name: str
    address: str
    incarnation: str
    memory: RankMemory
    share: Share
    """The pieces of each block and slot that are read from this rank."""
    own_list: PreparedList
    peer_list: PreparedList
    """Indices in :class:`kv_transfer.reads.part.PartIndices` refer to both lists: ``local`` to ``own_list``,
    ``remote`` to ``peer_list``."""
    epochs: PreparedList | None = None
    """One entry per lease. None unless this is a peer's rank 0 and this process validates the peer's
    leases."""


class Patience:
    """How long a read may go without progress before it is late.

    Several flights may share one patience; progress of any of them renews it.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._until = time.monotonic() + deadline_s

    def renew(self) -> None:
        self._until = time.monotonic() + self.deadline_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._until


@dataclass
class Flight:
    """A read under way, and the callbacks for its end and for its lateness."""

    peer: PeerMemory
    read: Read
    patience: Patience
    on_end: Callable[[TransferError | None], None]
    """Called once, with the error, or None if the read succeeded."""
    on_late: Callable[[], None]
    is_late: bool = False


class Flights:
    """Posts reads and reports their ends. ``on_lost`` is called for a peer that can't be read any more."""

    def __init__(self, agent: TransferAgent, on_lost: Callable[[PeerMemory], None]) -> None:
        self._agent = agent
        self._on_lost = on_lost
        self._flights: list[Flight] = []
        self._last_news_s = 0.0

    def __len__(self) -> int:
        return len(self._flights)

    def post(
        self,
        peer: PeerMemory,
        start: Callable[[], Read],
        *,
        patience: Patience,
        on_end: Callable[[TransferError | None], None],
        on_late: Callable[[], None],
    ) -> None:
        """Calls ``start``, which posts a read. A small read has often ended and been reported when this call
        returns."""
        self._last_news_s = time.monotonic()
        try:
            read = start()
        except TransferError as error:
            self._on_lost(peer)
            on_end(error)
            return
        flight = Flight(peer, read, patience, on_end, on_late)
        if not self._has_ended(flight):
            self._flights.append(flight)

    def poll(self) -> float | None:
        """Checks all reads; returns the seconds until the next check, None if no read is under way."""
        flights, self._flights = self._flights, []
        for flight in flights:  # a read that ends may cause the next one to be posted, to the new list
            if not self._has_ended(flight):
                self._flights.append(flight)
        quiet_s = time.monotonic() - self._last_news_s
        return read_poll_delay(quiet_s) if self._flights else None

    def is_reading(self, peer: PeerMemory) -> bool:
        return any(flight.peer.name == peer.name for flight in self._flights)

    def drain(self, give_up_s: float) -> None:
        """Waits up to ``give_up_s`` seconds for the end of the reads under way.

        Over TCP, the process of a live peer might not survive if its reader were suddenly gone.
        """
        give_up = time.monotonic() + give_up_s
        while self._flights and time.monotonic() < give_up:
            time.sleep(FAST_S)
            self._agent.poll()
            self.poll()

    def release(self) -> None:
        """Gives all handles back. A handle that was not given back would keep NIXL's agent
        alive, and late bytes could still arrive."""
        for flight in self._flights:
            flight.read.release()
        self._flights.clear()

    def _has_ended(self, flight: Flight) -> bool:
        state = flight.read.poll()
        if state == "busy":
            if not flight.is_late and flight.patience.is_over:
                flight.is_late = True
                flight.on_late()
            return False
        error = None
        if state == "failed":
            error = TransferError(f"the read failed: the prefill server at {flight.peer.address} is gone")
            self._on_lost(flight.peer)
        flight.on_end(error)
        flight.read.release()  # last: a request waits for the report above, but nothing waits for this
        return True
