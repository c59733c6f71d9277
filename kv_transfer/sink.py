"""The decode side of the handoff: reads a peer's blocks and state, and trusts nothing before it is checked.

A transfer is two reads and a notification: the data; then the lease's epoch, which tells whether the data
was still under lease when it was read; then ``Done``. NIXL gives no order within one read, hence two.

A read that misses its deadline is given up but not forgotten: its destination is in quarantine until NIXL
says that the read has ended one way or the other, since a frozen peer may thaw and its bytes land late.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from engine.caches import Caches
from kv_transfer.agent import Ranges, Read, TransferAgent, region_of
from kv_transfer.cadence import FAST_S, read_poll_delay
from kv_transfer.descriptors import unit_spans
from kv_transfer.handshake import EPOCH_BYTES, check_regions, check_same_model
from kv_transfer.poll_thread import PollThread
from wire.codec import encode
from wire.errors import HandshakeError, TransferError
from wire.handoff import Done, HandshakeReply, HandshakeRequest, Region, Ticket

log = logging.getLogger(__name__)

WARM_UP_DEADLINE_S = 10.0
DRAIN_S = 0.2
"""What reads under way get to end when the sink is closed."""


@dataclass(frozen=True)
class TransferResult:
    """How a transfer ended."""

    request_id: str
    num_bytes: int
    num_descriptors: int
    seconds: float
    """From the call of :meth:`TransferSink.read`."""
    error: TransferError | None
    settled: bool
    """False: bytes may still land at the destination; ``on_settled`` will say when none can any more."""


@dataclass(frozen=True)
class _Peer:
    name: str
    address: str
    reply: HandshakeReply


@dataclass
class _Flight:
    """A read under way and what to do when it ends or misses its deadline."""

    peer: _Peer
    read: Read
    deadline: float
    on_end: Callable[[TransferError | None, bool], None]
    """Called once, with what went wrong and whether the deadline had passed before."""
    on_late: Callable[[], None]
    is_late: bool = False


@dataclass(frozen=True)
class _Transfer:
    ticket: Ticket
    block_ids: Sequence[int]
    first_block: int
    state_slot: int
    started: float
    deadline: float
    on_done: Callable[[TransferResult], None]


class TransferSink:
    """Owns the decode server's transfers and its NIXL agent.

    Methods are thread-safe; callbacks are called on the transfer thread.
    """

    def __init__(
        self,
        caches: Caches,
        *,
        incarnation: str,
        fingerprint: str,
        on_settled: Callable[[str], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._caches = caches
        self._on_settled = on_settled
        self._kv_region, self._state_region = region_of(caches.kv), region_of(caches.state)
        # Every transfer owns a slot, hence a cell; cell 0 takes what nobody looks at.
        self._epochs = torch.zeros(caches.num_slots, dtype=torch.int64)
        self._epoch_cells = self._epochs.numpy()
        self._epoch_region = region_of(self._epochs)
        self._agent = TransferAgent(incarnation, [caches.kv, caches.state, self._epochs])
        self._introduction = HandshakeRequest(
            incarnation, fingerprint, 0, 1, caches.kv_layout, caches.state_layout
        )
        self._peers: dict[str, _Peer] = {}  # by incarnation
        self._gone: list[_Peer] = []
        self._flights: list[_Flight] = []
        self._num_transfers = 0
        self._bytes_read = 0
        self._last_news_s = 0.0
        self._thread = PollThread("transfer", self._poll, on_fatal)

    @property
    def num_in_flight(self) -> int:
        """Transfers that have neither succeeded, failed nor been given up."""
        return self._num_transfers

    @property
    def bytes_read(self) -> int:
        """Bytes of blocks and states read since the start."""
        return self._bytes_read

    def handshake_request(self) -> HandshakeRequest:
        return self._introduction

    def knows(self, incarnation: str) -> bool:
        """Whether memory of this life of a prefill server can be read."""
        return incarnation in self._peers

    def add_peer(self, address: str, reply: HandshakeReply) -> None:
        """Connects to a prefill server and reads once from it, so that no request pays for that.

        Blocks until it is done. Raises :class:`HandshakeError` if the two may not share state or the peer
        can't be reached.
        """
        check_same_model(self._introduction, reply, f"the prefill server at {address}")
        check_regions(reply)
        connected: Future[None] = Future()
        self._thread.post(lambda: self._connect(address, reply, connected))
        try:
            connected.result(timeout=WARM_UP_DEADLINE_S * 2)
        except (TransferError, TimeoutError) as error:
            raise HandshakeError(
                f"the prefill server at {address} can't be read from: {error}", cause="peer_gone"
            ) from error

    def read(
        self,
        ticket: Ticket,
        *,
        block_ids: Sequence[int],
        first_block: int = 0,
        state_slot: int,
        deadline_s: float,
        on_done: Callable[[TransferResult], None],
    ) -> None:
        """Reads what ``ticket`` names into our ``block_ids`` and ``state_slot``; returns at once.

        The prompt's first ``first_block`` blocks are here already; ``block_ids`` are for the others.

        ``on_done`` is called exactly once, no later than about ``deadline_s`` seconds from now.
        """
        now = time.monotonic()
        transfer = _Transfer(ticket, block_ids, first_block, state_slot, now, now + deadline_s, on_done)
        self._thread.post(lambda: self._start(transfer))

    def close(self) -> None:
        self._thread.post(self._drain)
        self._thread.stop()
        for peer in (*self._peers.values(), *self._gone):
            self._agent.remove_peer(peer.name)
        for flight in self._flights:
            flight.read.release()
        self._flights.clear()  # a handle kept would keep NIXL's agent alive, and late bytes coming
        self._agent.close()

    def _drain(self) -> None:
        """Lets reads end that a living peer is answering; over TCP it might not survive to find us gone."""
        give_up = time.monotonic() + DRAIN_S
        while self._flights and time.monotonic() < give_up:
            time.sleep(FAST_S)
            self._poll()

    # --- connecting, on the transfer thread ------------------------------------------------------

    def _connect(self, address: str, reply: HandshakeReply, connected: Future[None]) -> None:
        if self.knows(reply.incarnation):
            connected.set_result(None)
            return
        for stale in [peer for peer in self._peers.values() if peer.address == address]:
            self._forget(stale)
        self._remove_gone()
        try:
            peer = _Peer(self._add_to_agent(reply), address, reply)
        except TransferError as error:
            connected.set_exception(error)
            return

        def on_end(error: TransferError | None, late: bool) -> None:
            if late:  # reported already; what the peer did not answer in time is not built on
                return
            if error is None:
                self._peers[reply.incarnation] = peer
                connected.set_result(None)
            else:
                self._gone.append(peer)
                connected.set_exception(error)

        def on_late() -> None:
            self._gone.append(peer)
            connected.set_exception(TransferError(f"no answer within {WARM_UP_DEADLINE_S} s"))

        self._fly(
            peer,
            self._epoch_range(0, reply.epoch_region, 0),
            local=self._epoch_region,
            remote=reply.epoch_region,
            deadline=time.monotonic() + WARM_UP_DEADLINE_S,
            on_end=on_end,
            on_late=on_late,
        )

    def _add_to_agent(self, reply: HandshakeReply) -> str:
        """The name by which NIXL knows the peer. Raises :class:`TransferError` if it can't be added."""
        if any(peer.name == reply.incarnation for peer in self._gone):
            raise TransferError("reads that it failed to answer have not ended yet; try again later")
        name = self._agent.add_peer(reply.agent_metadata)
        if name != reply.incarnation:
            if not self.knows(name):
                self._agent.remove_peer(name)
            raise TransferError(f"its metadata is of {name!r}, its handshake of {reply.incarnation!r}")
        return name

    def _forget(self, peer: _Peer) -> None:
        """The peer is gone or another; NIXL lets go of it once no read of it is under way.

        Not before: removing a peer does not stop a read, it only hides that the bytes still land.
        """
        if self._peers.get(peer.reply.incarnation) is peer:
            del self._peers[peer.reply.incarnation]
            self._gone.append(peer)

    def _remove_gone(self) -> None:
        busy = {flight.peer.name for flight in self._flights}
        for peer in [peer for peer in self._gone if peer.name not in busy]:
            self._gone.remove(peer)
            self._agent.remove_peer(peer.name)

    # --- a transfer, on the transfer thread ------------------------------------------------------

    def _start(self, transfer: _Transfer) -> None:
        self._num_transfers += 1
        peer = self._peers.get(transfer.ticket.incarnation)
        if peer is None:
            self._end(transfer, TransferError("the prefill server that wrote the ticket is gone"))
            return
        try:
            ranges = self._ranges(transfer, peer.reply)
        except TransferError as error:
            self._end(transfer, TransferError(error.message, cause="ticket_refused"))
            return
        self._fly_for(
            transfer,
            peer,
            ranges,
            local=self._kv_region,
            remote=peer.reply.kv_region,
            on_success=lambda: self._validate(transfer, peer, ranges),
        )

    def _ranges(self, transfer: _Transfer, reply: HandshakeReply) -> Ranges:
        """The data's addresses on both sides; raises :class:`TransferError` for what is out of bounds."""
        ticket, caches = transfer.ticket, self._caches
        if ticket.lease_id >= reply.epoch_region.num_bytes // EPOCH_BYTES:
            raise TransferError(f"the ticket's lease {ticket.lease_id} is outside the peer's epoch table")
        theirs_missing_here = ticket.block_ids[transfer.first_block :]
        blocks = unit_spans(caches.kv_layout, transfer.block_ids, reply.kv_layout, theirs_missing_here)
        slots = unit_spans(
            caches.state_layout, [transfer.state_slot], reply.state_layout, [ticket.state_slot]
        )
        rows = [
            (ours.address + span.local, theirs.address + span.remote, span.num_bytes)
            for spans, ours, theirs in (
                (blocks, self._kv_region, reply.kv_region),
                (slots, self._state_region, reply.state_region),
            )
            for span in spans
        ]
        return np.array(rows, dtype=np.uint64).reshape(-1, 3)

    def _validate(self, transfer: _Transfer, peer: _Peer, ranges: Ranges) -> None:
        """The data is here; read the lease's epoch to learn whether it was still under lease."""
        cell = transfer.state_slot
        region = peer.reply.epoch_region
        self._fly_for(
            transfer,
            peer,
            self._epoch_range(cell, region, transfer.ticket.lease_id),
            local=self._epoch_region,
            remote=region,
            on_success=lambda: self._accept(transfer, peer, ranges),
        )

    def _epoch_range(self, cell: int, region: Region, lease_id: int) -> Ranges:
        ours = self._epoch_region.address + cell * EPOCH_BYTES
        theirs = region.address + lease_id * EPOCH_BYTES
        return np.array([(ours, theirs, EPOCH_BYTES)], dtype=np.uint64)

    def _accept(self, transfer: _Transfer, peer: _Peer, ranges: Ranges) -> None:
        ticket = transfer.ticket
        found = int(self._epoch_cells[transfer.state_slot])
        if found != ticket.epoch:
            error = TransferError(
                f"the lease ended while its data was read (epoch {found}, the ticket's is {ticket.epoch}); "
                "what was read is thrown away",
                cause="lease_ended",
            )
            self._end(transfer, error)
            return
        try:
            self._agent.notify(peer.name, encode(Done(ticket.lease_id, ticket.epoch)))
        except TransferError as error:  # the data is valid; the lease ends by its time to live
            log.warning("request %s: the prefill server was not told: %s", ticket.request_id, error)
        self._end(transfer, None, ranges)
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        """A small read behind a notification: when it has ended, the notification has arrived.

        It keeps this thread polling until then, and whatever wait for the peer a notification causes is over
        before the next transfer's read, which would otherwise end with it (measured: 0.1 to 1 ms).
        """
        region = peer.reply.epoch_region
        self._fly(
            peer,
            self._epoch_range(0, region, 0),
            local=self._epoch_region,
            remote=region,
            deadline=math.inf,
            on_end=lambda error, late: None,
            on_late=lambda: None,
        )

    def _end(self, transfer: _Transfer, error: TransferError | None, ranges: Ranges | None = None) -> None:
        """Reports a transfer of which no byte can land any more."""
        self._num_transfers -= 1
        num_bytes = 0 if ranges is None else int(ranges[:, 2].sum())
        self._bytes_read += num_bytes
        transfer.on_done(
            TransferResult(
                transfer.ticket.request_id,
                num_bytes,
                0 if ranges is None else len(ranges),
                time.monotonic() - transfer.started,
                error,
                settled=True,
            )
        )

    def _give_up(self, transfer: _Transfer) -> None:
        """The deadline has passed; the destination stays in quarantine."""
        self._num_transfers -= 1
        seconds = time.monotonic() - transfer.started
        error = TransferError(f"the prefill server did not deliver within {seconds:.1f} s", cause="deadline")
        transfer.on_done(TransferResult(transfer.ticket.request_id, 0, 0, seconds, error, settled=False))

    # --- reads, on the transfer thread -----------------------------------------------------------

    def _fly_for(
        self,
        transfer: _Transfer,
        peer: _Peer,
        ranges: Ranges,
        *,
        local: Region,
        remote: Region,
        on_success: Callable[[], None],
    ) -> None:
        """Posts one of a transfer's two reads."""

        def on_end(error: TransferError | None, late: bool) -> None:
            if late:
                self._on_settled(transfer.ticket.request_id)
            elif error is not None:
                self._end(transfer, error)
            else:
                on_success()

        self._last_news_s = time.monotonic()
        self._fly(
            peer,
            ranges,
            local=local,
            remote=remote,
            deadline=transfer.deadline,
            on_end=on_end,
            on_late=lambda: self._give_up(transfer),
        )

    def _fly(
        self,
        peer: _Peer,
        ranges: Ranges,
        *,
        local: Region,
        remote: Region,
        deadline: float,
        on_end: Callable[[TransferError | None, bool], None],
        on_late: Callable[[], None],
    ) -> None:
        """Posts a read; small ones are often over when the call returns."""
        try:
            read = self._agent.read(peer.name, ranges, local=local, remote=remote)
        except TransferError as error:
            self._forget(peer)
            on_end(error, False)
            return
        flight = _Flight(peer, read, deadline, on_end, on_late)
        if not self._has_ended(flight):
            self._flights.append(flight)

    def _poll(self) -> float | None:
        self._agent.poll()
        flights, self._flights = self._flights, []
        for flight in flights:  # what ends may post the next read, which joins the new list
            if not self._has_ended(flight):
                self._flights.append(flight)
        self._remove_gone()
        quiet_s = time.monotonic() - self._last_news_s
        return read_poll_delay(quiet_s) if self._flights else None

    def _has_ended(self, flight: _Flight) -> bool:
        state = flight.read.poll()
        if state == "busy":
            if not flight.is_late and time.monotonic() > flight.deadline:
                flight.is_late = True
                flight.on_late()
            return False
        flight.read.release()
        error = None
        if state == "failed":
            error = TransferError(f"the read failed: the prefill server at {flight.peer.address} is gone")
            self._forget(flight.peer)
        flight.on_end(error, flight.is_late)
        return True
