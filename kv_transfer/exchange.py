"""A server's two sides of the handoff beside its engine: memory that others read, and what it reads itself.

Both services use it: a prefill server leases prompts and reads the kept states of conversations, a decode
server reads prompts and leases the states that it keeps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from engine.host import EngineHost
from engine.request import Request
from kv_transfer.failure_counts import FailureCounts
from kv_transfer.followers import Followers
from kv_transfer.lease_keeper import LeaseKeeper
from kv_transfer.other_ranks import OtherRanks
from kv_transfer.part_plan import Destination, PartPlan
from kv_transfer.peers import Peers
from kv_transfer.progress_feed import ProgressFeeds
from kv_transfer.sink import TransferSink
from kv_transfer.source import EndedLease, TransferSource, transfer_handlers
from kv_transfer.transfer import TransferResult
from wire.errors import CancelledRequestError
from wire.generation import RequestOutput, ServerStats
from wire.handoff import AnyTicket, Digests, EndLease, PartialTicket, Ticket
from wire.rpc import FOLLOW, TRANSFER_SERVICE, replies_handler
from wire.server import GrpcServer


class StateExchange:
    """Leases, reads and peers of one engine.

    ``on_read`` is told on the engine's thread how each read ended, with what the engine says to the request's
    client if it failed; ``on_lease_ended`` on the transfer thread that a lease is over.
    """

    def __init__(
        self,
        host: EngineHost,
        server: GrpcServer,
        *,
        address: str,
        incarnation: str,
        lease_ttl_s: float,
        transfer_deadline_s: float,
        handshake_timeout_s: float,
        on_read: Callable[[Request, TransferResult, list[RequestOutput]], None],
        on_lease_ended: Callable[[EndedLease], None] = lambda _: None,
    ) -> None:
        self._host = host
        self._engine = host.engine
        self._transfer_deadline_s = transfer_deadline_s
        self._on_read = on_read
        self._on_lease_ended = on_lease_ended
        self._sink = TransferSink(
            self._engine.caches,
            incarnation=incarnation,
            fingerprint=self._engine.fingerprint,
            on_settled=self._settled,
            on_fatal=server.fail,
            ranks=host.ranks,
        )
        other_ranks = OtherRanks(host.ranks, self._sink.take_report, incarnation=incarnation)
        self._source = TransferSource(
            self._engine.caches,
            address=address,
            incarnation=incarnation,
            fingerprint=self._engine.fingerprint,
            lease_ttl_s=lease_ttl_s,
            max_leases=self._engine.capacity.max_held + 1,
            on_lease_ended=self._lease_ended,
            on_fatal=server.fail,
            other_ranks=other_ranks.memories(),
            on_serving=other_ranks.serve,
        )
        self._tickets: dict[str, AnyTicket] = {}  # of leases that are held; the engine's thread alone
        self._num_published: dict[str, int] = {}  # blocks told of prompts that are computed; likewise
        self._feeds = ProgressFeeds(incarnation)
        self._failures = FailureCounts()
        # All reasons from the start: its size never changes while another thread copies it.
        self._leases_ended: dict[str, int] = {"done": 0, "ended": 0, "expired": 0}
        self.peers = Peers(self._sink, self._failures, timeout_s=handshake_timeout_s)
        """The servers that are read from. Lives on the event loop."""
        self._keeper = LeaseKeeper(self.peers)
        self._followers = Followers(self.peers)
        follow = {FOLLOW.name: replies_handler(FOLLOW, self._feeds.follow)}
        server.add_service(TRANSFER_SERVICE, transfer_handlers(self._source) | follow)

    def knows(self, ticket: AnyTicket) -> bool:
        """Whether the ticket's server can be read without a handshake."""
        return self._sink.knows(ticket.incarnation)

    def expect(self, ticket: AnyTicket) -> None:
        """The ticket is to be read when there is room: its lease is kept alive until then."""
        self._keeper.hold(ticket)

    def announce(self, ticket: AnyTicket) -> None:
        """The same of a kept state: its server expects no reader, and polls seldom until it is told."""
        self._keeper.announce(ticket)

    def forget(self, ticket: AnyTicket) -> None:
        """The ticket will not be read here."""
        self._keeper.let_go(ticket)

    def decline(self, ticket: AnyTicket) -> None:
        """The ticket will not be read, or no further: its lease ends now."""
        self._keeper.let_go(ticket)
        self._followers.stop(ticket)
        self.peers.end_lease_soon(ticket)

    def stop_following(self) -> None:
        """No prompt is read any further that is still computed."""
        self._followers.stop_all()

    async def close(self) -> None:
        """Stops the engine as well: it must be gone before the memory that others read is."""
        await self._followers.close()
        await self._keeper.close()
        await self.peers.close()
        await asyncio.to_thread(self._host.stop)
        await asyncio.to_thread(self._sink.close)
        await asyncio.to_thread(self._source.close)

    # --- on the engine's thread ------------------------------------------------------------------

    def publish(self, request: Request) -> PartialTicket | None:
        """Tells followers which blocks of a prompt are full that is still computed.

        The first time the prompt is leased, and its early ticket returned; None from then on.
        """
        request_id = request.request_id
        early, is_new = self._tickets.get(request_id), request_id not in self._tickets
        if early is None:
            early = self._source.open(request_id, num_tokens=request.target)
            self._tickets[request_id], request.lender = early, self
            self._num_published[request_id] = 0
            self._host.answer(self._feeds.open, early)
        num_full = request.num_computed // self._engine.config.block_size
        further = request.memory.block_ids[self._num_published[request_id] : num_full]
        self._num_published[request_id] = num_full
        self._host.answer(self._feeds.add, early, further)
        return early if is_new and isinstance(early, PartialTicket) else None

    def lease(self, request: Request) -> Ticket:
        """A ticket for the blocks and the state of a request that the engine holds."""
        request_id = request.request_id
        early = self._tickets.get(request_id)
        if isinstance(early, PartialTicket):
            block_ids, digests = self._covered(request)
            ticket = self._source.settle(
                early, block_ids=block_ids, state_slot=request.memory.state_slot, digests=digests
            )
            if ticket is not None:
                self._host.answer(self._feeds.complete, ticket)
                self._tickets[request_id] = ticket
                return ticket
            self._forget(request_id, early)  # whoever followed did not want it any more
        return self._leased(request, self._source.grant)

    def keep(self, request: Request) -> Ticket:
        """The same for a reader that may come with the conversation's next turn."""
        return self._leased(request, self._source.keep)

    def _leased(self, request: Request, grant: Callable[..., Ticket]) -> Ticket:
        block_ids, digests = self._covered(request)
        ticket = grant(
            request.request_id,
            num_tokens=request.num_computed,
            block_ids=block_ids,
            state_slot=request.memory.state_slot,
            digests=digests,
        )
        self._tickets[request.request_id], request.lender = ticket, self
        return ticket

    def _covered(self, request: Request) -> tuple[Sequence[int], Digests | None]:
        num_blocks = self._engine.capacity.blocks_for(request.num_computed)
        return request.memory.block_ids[:num_blocks], self._engine.digests(request.request_id)

    def holds(self, request_id: str) -> bool:
        """Whether a lease of ours on this request's state has not ended."""
        return request_id in self._tickets

    def end_lease(self, request_id: str) -> bool:
        """Ends a lease of ours early: who reads late finds it ended. False if the request has none."""
        ticket = self._tickets.get(request_id)
        if ticket is None:
            return False
        self._source.end(EndLease(request_id, ticket.lease_id, ticket.epoch))
        return True

    def read(self, request: Request) -> None:
        """Reads what the request's ticket names, but for the blocks that the prefix cache had.

        With an early ticket that takes as long as its prompt is computed.
        """
        ticket = request.ticket

        def on_done(transfer: TransferResult) -> None:  # on the transfer thread
            landed_s = time.monotonic()
            self._host.post(lambda: self._transferred(request, transfer, landed_s))

        if isinstance(ticket, PartialTicket):
            self._follow(request, ticket, on_done)
            return
        assert ticket is not None
        num_cached = len(request.memory.nodes)
        self._sink.read(
            # The sink reports by the ticket's request, which for a kept state is the turn before this one.
            replace(ticket, request_id=request.request_id),
            block_ids=request.memory.block_ids[num_cached : len(ticket.block_ids)],
            first_block=num_cached,
            state_slot=request.memory.state_slot,
            deadline_s=self._transfer_deadline_s,
            on_done=on_done,
        )

    def _follow(
        self, request: Request, early: PartialTicket, on_done: Callable[[TransferResult], None]
    ) -> None:
        """Reads each block once it is computed; the request goes on with the whole ticket."""

        def take(ticket: Ticket) -> None:
            request.ticket = ticket

        destination = Destination(
            block_ids=tuple(request.memory.block_ids),
            num_cached=len(request.memory.nodes),
            state_slot=request.memory.state_slot,
            block_size=self._engine.config.block_size,
        )
        transfer = self._sink.begin(
            request.request_id, early.incarnation, deadline_s=self._transfer_deadline_s, on_done=on_done
        )
        start = partial(self._followers.start, on_ticket=lambda ticket: self._host.post(lambda: take(ticket)))
        self._host.answer(start, early, PartPlan(early, destination), transfer)

    def stats(self) -> ServerStats:
        """The engine's figures and those of leases and transfers."""
        return replace(
            self._engine.stats(),
            leases_held=self._source.num_leases,
            leases_ended=dict(self._leases_ended),
            transfers_in_flight=self._sink.num_in_flight,
            transfer_bytes=self._sink.bytes_read,
            early_bytes=self._sink.early_bytes,
            transfer_parts=self._sink.num_parts,
            transfer_failures=self._failures.counts(),
        )

    def _transferred(self, request: Request, transfer: TransferResult, landed_s: float) -> None:
        assert request.ticket is not None
        measured = request.measured
        measured.landed_s = landed_s
        self._host.answer(self._keeper.let_go, request.ticket)
        measured.transfer_s = transfer.seconds
        measured.transfer_bytes = transfer.num_bytes
        measured.transfer_descriptors = transfer.num_descriptors
        measured.early_bytes = transfer.early_bytes
        outputs = self._engine.transferred(request, error=transfer.error, settled=transfer.settled)
        if transfer.error is None:
            self._engine.measures.transfer.add(transfer.seconds)
        elif not isinstance(transfer.error, CancelledRequestError):
            self._failures.count(transfer.error)
        if transfer.error is None and outputs:  # it came, and is not what was sent
            self._failures.add("digest")
        self._on_read(request, transfer, outputs)

    def _release(self, lease: EndedLease) -> None:
        """A lease is over, and its memory free unless it is leased anew."""
        ticket = self._tickets.get(lease.request_id)
        if ticket is not None and (ticket.lease_id, ticket.epoch) == (lease.lease_id, lease.epoch):
            self._forget(lease.request_id, ticket)
            self._engine.release(lease.request_id)

    def revoke(self, request: Request) -> None:
        """A request gives its memory back, and others may get it next: whoever still reads must find out."""
        ticket = self._tickets.get(request.request_id)
        if ticket is not None:
            self._source.revoke(ticket)
            self._forget(request.request_id, ticket)

    def _forget(self, request_id: str, ticket: AnyTicket) -> None:
        del self._tickets[request_id]
        if self._num_published.pop(request_id, None) is not None:  # it had an early ticket, hence a feed
            self._host.answer(self._feeds.end, ticket.lease_id, ticket.epoch)

    # --- on the transfer thread ------------------------------------------------------------------

    def _settled(self, request_id: str) -> None:
        self._host.post(lambda: self._engine.release(request_id))

    def _lease_ended(self, lease: EndedLease) -> None:
        self._leases_ended[lease.reason] += 1
        self._on_lease_ended(lease)
        self._host.post(lambda: self._release(lease))
