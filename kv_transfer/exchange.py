"""Both sides of a server's handoff: its memory that other servers read, and its reads of their memory.

Both services use this module. A prefill server leases prompts and reads the kept states of conversations; a
decode server reads prompts and moved requests, and leases the states that it keeps or that move.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.host import EngineHost
from engine.request import Request
from kv_transfer.digester import Digester
from kv_transfer.engine_server import EngineServerConfig
from kv_transfer.handshake import introduce
from kv_transfer.leases.progress_feed import ProgressFeeds
from kv_transfer.leases.seals import OnTicket, make_seals
from kv_transfer.leases.source import EndedLease, SourceListener, TransferSource, transfer_handlers
from kv_transfer.nixl.transfer_thread import TransferThread
from kv_transfer.ranks.other_ranks import OtherRanks
from kv_transfer.reads.failure_counts import FailureCounts
from kv_transfer.reads.followers import Followers
from kv_transfer.reads.lease_renewer import LeaseRenewer
from kv_transfer.reads.part_plan import Destination, PartPlan
from kv_transfer.reads.peers import Peers
from kv_transfer.reads.sink import TransferSink
from kv_transfer.reads.transfer import TransferListener, TransferResult
from kv_transfer.starts.neighbour_store import NeighbourStore
from kv_transfer.starts.shared_starts import RegisteredStarts, SharedStarts
from wire.channels import channels_of
from wire.errors import CancelledRequestError
from wire.http.address import host_port
from wire.messages.generation import RequestOutput, ServerStats
from wire.messages.handoff import AnyTicket, Digests, EndLease, PartialTicket, Ticket
from wire.rpc import FOLLOW, TRANSFER_SERVICE, replies_handler
from wire.server import GrpcServer


class ExchangeListener:
    """Callbacks to the service that owns an exchange. This base class ignores every call."""

    def read_ended(self, request: Request, result: TransferResult, outputs: list[RequestOutput]) -> None:
        """Called on the engine's thread; ``outputs`` go from the engine to the request's client."""

    def lease_ended(self, lease: EndedLease) -> None:
        """Called on the transfer thread."""


class StateExchange(TransferListener, SourceListener):
    """The leases, reads and peers of one engine."""

    def __init__(
        self,
        host: EngineHost,
        server: GrpcServer,
        listener: ExchangeListener,
        config: EngineServerConfig,
        *,
        incarnation: str,
        lease_ttl_s: float,
        neighbours: NeighbourStore | None = None,
    ) -> None:
        """``neighbours``: servers that share cached prefixes in host memory with this one."""
        self._host = host
        self._engine = host.engine
        self._listener = listener
        self._transfer_deadline_s = config.transfer_deadline_s
        caches, ranks = self._engine.caches, host.ranks
        num_ranks = 1 if ranks is None else ranks.size
        introduction = introduce(caches, incarnation, self._engine.fingerprint, num_ranks=num_ranks)
        self._thread = TransferThread(caches, incarnation, server.fail)
        registered = RegisteredStarts.of(neighbours, self._engine, self._thread, config)
        # With several ranks, rank 0 sees a share of the bytes alone.
        digests = config.verify_handoffs != "off" and ranks is None and Digester.takes(caches)
        self._digester = Digester(caches, server.fail) if digests else None
        only_quick = config.verify_handoffs == "quick"
        self._seals = make_seals(self._digester, host.answer, only_quick=only_quick)
        self._sink = TransferSink(self._thread, introduction, self, ranks, self._digester)
        self._other_ranks = OtherRanks(ranks, self._sink.take_report, incarnation=incarnation)
        address = host_port(config.advertise_host or config.host, server.port)
        self._source = TransferSource(
            self._thread,
            introduction,
            self,
            address=address,
            lease_ttl_s=lease_ttl_s,
            max_leases=self._engine.capacity.max_held + 1,
            other_ranks=self._other_ranks.memories(),
            max_loans=0 if registered is None else registered.max_loans,
        )
        self._thread.start(self._source, self._sink)
        # Only the engine's thread uses the next four fields.
        self._reading: dict[str, Request] = {}  # requests whose state is being read
        self._tickets: dict[str, AnyTicket] = {}  # tickets of the leases held, by request
        self._kept: set[str] = set()  # requests whose leases were made by `keep`; a reader may never come
        self._num_published: dict[str, int] = {}  # published blocks of each prompt that is being computed
        self._feeds = ProgressFeeds(incarnation)
        self._failures = FailureCounts()
        # All reasons are keys from the start, so that the size never changes while another thread copies it.
        self._leases_ended: dict[str, int] = {"done": 0, "ended": 0, "expired": 0}
        self.peers = Peers(
            self._sink,
            self._failures,
            timeout_s=config.handshake_timeout_s,
            channels=channels_of(server.identity),
        )
        """The servers that this one reads from. Used only on the event loop."""
        self._keeper = LeaseRenewer(self.peers)
        self._followers = Followers(self.peers, self._followed)
        handlers = transfer_handlers(self._source)
        handlers[FOLLOW.name] = replies_handler(FOLLOW, self._feeds.follow)
        self.starts: SharedStarts | None = None
        """None: this server shares no cached prefixes."""
        if registered is not None:
            self.starts = SharedStarts(
                *(registered, host, self._thread, self._source, self._sink, self.peers),
                address=address,
                incarnation=incarnation,
            )
            handlers |= self.starts.handlers()
        server.add_service(TRANSFER_SERVICE, handlers)

    def knows(self, ticket: AnyTicket) -> bool:
        """Whether the ticket's server can be read without a handshake."""
        return self._sink.knows(ticket.incarnation)

    def expect(self, ticket: AnyTicket) -> None:
        """Keeps the ticket's lease alive until the read has ended, or until :meth:`forget` or
        :meth:`decline` is called."""
        self._keeper.hold(ticket)

    def announce(self, ticket: AnyTicket) -> None:
        """Like :meth:`expect`, for a kept state, whose lease is renewed at once.

        The state's server expects no reader, and polls seldom, until it gets this renewal.
        """
        self._keeper.announce(ticket)

    def forget(self, ticket: AnyTicket) -> None:
        """Stops renewing the ticket's lease: its state was read, or will not be read here."""
        self._keeper.let_go(ticket)

    def decline(self, ticket: AnyTicket) -> None:
        """Stops reading the ticket, if that has begun, and ends its lease now."""
        self._keeper.let_go(ticket)
        self._followers.stop(ticket)
        self.peers.end_lease_soon(ticket)

    def stop_following(self) -> None:
        """Stops reading all prompts that are still being computed."""
        self._followers.stop_all()

    async def close(self) -> None:
        """Stops the engine, then both sides: the engine must stop before the memory that others read is
        released."""
        if self.starts is not None:
            await self.starts.close()
        await self._followers.close()
        await self._keeper.close()
        await self.peers.close()
        await asyncio.to_thread(self._host.stop)
        if self._digester is not None:
            await asyncio.to_thread(self._digester.close)
        await asyncio.to_thread(self._thread.close)

    # --- on the engine's thread ------------------------------------------------------------------

    def publish(self, request: Request) -> PartialTicket | None:
        """Tells followers which blocks of a prompt are full while the prompt is still being computed.

        The first call leases the prompt and returns its early ticket. Later calls return None.
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
        if further:
            lease = early
            self._seals.progress(early, further, lambda ids, digests: self._feeds.add(lease, ids, digests))
        return early if is_new and isinstance(early, PartialTicket) else None

    def lease(self, request: Request, then: OnTicket) -> None:
        """Leases the blocks and the state of a request that the engine holds.

        ``then`` gets the ticket on the event loop, once what it names is digested.
        """
        request_id = request.request_id
        early = self._tickets.get(request_id)
        if isinstance(early, PartialTicket):
            block_ids, digests = self._covered(request)
            ticket = self._source.settle(
                early, block_ids=block_ids, state_slot=request.memory.state_slot, digests=digests
            )
            if ticket is not None:
                self._tickets[request_id] = ticket

                def complete(sealed: Ticket) -> None:
                    self._feeds.complete(sealed)
                    then(sealed)

                self._seals.seal(ticket, complete)
                return
            self._forget(request_id, early)  # the follower did not want the prompt any more
        self._seals.seal(self._leased(request, self._source.grant), then)

    def keep(self, request: Request, then: OnTicket) -> None:
        """Like :meth:`lease`, for a reader that may come with the conversation's next turn."""
        self._kept.add(request.request_id)
        self._seals.seal(self._leased(request, self._source.keep), then)

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

    @property
    def awaits_reader(self) -> bool:
        """Whether any lease has a reader to wait for. Leases kept for a next turn don't count."""
        return len(self._tickets) > len(self._kept)

    def end_lease(self, request_id: str) -> bool:
        """Ends one of our leases early; its epoch tells a late reader. Returns False if the request has no
        lease."""
        ticket = self._tickets.get(request_id)
        if ticket is None:
            return False
        self._source.end(EndLease(request_id, ticket.lease_id, ticket.epoch))
        return True

    def read(self, request: Request) -> None:
        """Reads all that the request's ticket names, except the blocks that the prefix cache had.

        With an early ticket the read lasts until the prompt is computed.
        """
        ticket = request.ticket
        assert ticket is not None
        self._reading[request.request_id] = request
        if isinstance(ticket, PartialTicket):
            self._follow(request, ticket)
            return
        num_cached = len(request.memory.nodes)
        self._sink.read(
            # The sink reports by the ticket's request id. A kept state's ticket has the previous turn's id.
            replace(ticket, request_id=request.request_id),
            block_ids=request.memory.block_ids[num_cached : len(ticket.block_ids)],
            first_block=num_cached,
            state_slot=request.memory.state_slot,
            deadline_s=self._transfer_deadline_s,
        )

    def _follow(self, request: Request, early: PartialTicket) -> None:
        """Reads each block once it is computed. At the end, the whole ticket replaces the request's early
        ticket."""
        destination = Destination(
            block_ids=tuple(request.memory.block_ids),
            num_cached=len(request.memory.nodes),
            state_slot=request.memory.state_slot,
            block_size=self._engine.config.block_size,
        )
        transfer = self._sink.begin(
            request.request_id, early.incarnation, deadline_s=self._transfer_deadline_s
        )
        self._host.answer(self._followers.start, early, PartPlan(early, destination), transfer)

    def stats(self) -> ServerStats:
        """Returns the engine's stats with the stats of leases and transfers."""
        read = self._sink.counts
        return replace(
            self._engine.stats(),
            leases_held=self._source.num_leases,
            leases_ended=dict(self._leases_ended),
            transfers_in_flight=read.num_in_flight,
            transfer_bytes=read.bytes_read,
            early_bytes=read.early_bytes,
            transfer_parts=read.num_parts,
            transfer_failures=self._failures.counts(),
        )

    def _read_ended(self, transfer: TransferResult, landed_s: float) -> None:
        request = self._reading.pop(transfer.request_id)
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
        if transfer.error is None and outputs:  # the data arrived but differs from what was sent
            self._failures.add("digest")
        self._listener.read_ended(request, transfer, outputs)

    def _release(self, lease: EndedLease) -> None:
        """Frees the memory of a lease that is over, unless the request has a newer lease."""
        ticket = self._tickets.get(lease.request_id)
        if ticket is not None and (ticket.lease_id, ticket.epoch) == (lease.lease_id, lease.epoch):
            self._forget(lease.request_id, ticket)
            self._engine.release(lease.request_id)

    def revoke(self, request: Request) -> None:
        """Ends the lease of a request that gives its memory back, because another request may get the memory.

        A reader that is still reading finds out by the lease's epoch.
        """
        ticket = self._tickets.get(request.request_id)
        if ticket is not None:
            self._source.revoke(ticket)
            self._forget(request.request_id, ticket)

    def _forget(self, request_id: str, ticket: AnyTicket) -> None:
        del self._tickets[request_id]
        self._kept.discard(request_id)
        self._seals.drop(ticket)
        if self._num_published.pop(request_id, None) is not None:  # it had an early ticket, so it has a feed
            self._host.answer(self._feeds.end, ticket.lease_id, ticket.epoch)

    def _take_ticket(self, request_id: str, ticket: Ticket) -> None:
        request = self._reading.get(request_id)
        if request is not None:
            request.ticket = ticket

    # --- on the event loop -----------------------------------------------------------------------

    def _followed(self, request_id: str, ticket: Ticket) -> None:
        self._host.post(lambda: self._take_ticket(request_id, ticket))

    # --- on the transfer thread, as its listener -------------------------------------------------

    def transferred(self, result: TransferResult) -> None:
        landed_s = time.monotonic()
        self._host.post(lambda: self._read_ended(result, landed_s))

    def settled(self, request_id: str) -> None:
        self._host.post(lambda: self._engine.release(request_id))

    def lease_ended(self, lease: EndedLease) -> None:
        self._leases_ended[lease.reason] += 1
        self._listener.lease_ended(lease)
        self._host.post(lambda: self._release(lease))

    def loan_ended(self, lease: EndedLease) -> None:
        assert self.starts is not None
        self.starts.loan_ended(lease)

    def serving(self, is_on: bool) -> None:
        self._other_ranks.serve(is_on)
