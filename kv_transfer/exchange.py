"""A server's two sides of the handoff beside its engine: memory that others read, and what it reads itself.

Both services use it: a prefill server leases prompts and reads the kept states of conversations, a decode
server reads prompts and leases the states that it keeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from engine.capacity import blocks_for
from engine.host import EngineHost
from engine.request import Request
from kv_transfer.failure_counts import FailureCounts
from kv_transfer.handlers import transfer_handlers
from kv_transfer.lease_keeper import LeaseKeeper
from kv_transfer.peers import Peers
from kv_transfer.sink import TransferResult, TransferSink
from kv_transfer.source import EndedLease, TransferSource
from wire.generation import RequestOutput, ServerStats
from wire.handoff import EndLease, Ticket
from wire.rpc import TRANSFER_SERVICE
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
            on_settled=self._release_soon,
            on_fatal=server.fail,
        )
        self._source = TransferSource(
            self._engine.caches,
            address=address,
            incarnation=incarnation,
            fingerprint=self._engine.fingerprint,
            lease_ttl_s=lease_ttl_s,
            max_leases=self._engine.capacity.num_slots,
            on_lease_ended=self._lease_ended,
            on_fatal=server.fail,
        )
        self._tickets: dict[str, Ticket] = {}  # of leases that are held; the engine's thread alone
        self._failures = FailureCounts()
        # All reasons from the start: its size never changes while another thread copies it.
        self._leases_ended: dict[str, int] = {"done": 0, "ended": 0, "expired": 0}
        self.peers = Peers(self._sink, self._failures, timeout_s=handshake_timeout_s)
        """The servers that are read from. Lives on the event loop."""
        self._keeper = LeaseKeeper(self.peers)
        server.add_service(TRANSFER_SERVICE, transfer_handlers(self._source))

    def knows(self, ticket: Ticket) -> bool:
        """Whether the ticket's server can be read without a handshake."""
        return self._sink.knows(ticket.incarnation)

    def expect(self, ticket: Ticket) -> None:
        """The ticket is to be read when there is room: its lease is kept alive until then."""
        self._keeper.hold(ticket)

    def forget(self, ticket: Ticket) -> None:
        """The ticket will not be read here."""
        self._keeper.let_go(ticket)

    def decline(self, ticket: Ticket) -> None:
        """The ticket will not be read at all: its lease ends now."""
        self._keeper.let_go(ticket)
        self.peers.end_lease_soon(ticket)

    async def close(self) -> None:
        """Stops the engine as well: it must be gone before the memory that others read is."""
        await self._keeper.close()
        await self.peers.close()
        await asyncio.to_thread(self._host.stop)
        await asyncio.to_thread(self._sink.close)
        await asyncio.to_thread(self._source.close)

    # --- on the engine's thread ------------------------------------------------------------------

    def lease(self, request: Request) -> Ticket:
        """A ticket for the blocks and the state of a request that the engine holds."""
        num_blocks = blocks_for(request.num_computed, self._engine.config.block_size)
        ticket = self._source.grant(
            request.request_id,
            num_tokens=request.num_computed,
            block_ids=request.block_ids[:num_blocks],
            state_slot=request.state_slot,
            digests=self._engine.digests(request),
        )
        self._tickets[request.request_id] = ticket
        return ticket

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
        """Reads what the request's ticket names, but for the blocks that the prefix cache had."""
        ticket = request.ticket
        assert ticket is not None

        def on_done(transfer: TransferResult) -> None:  # on the transfer thread
            self._host.post(lambda: self._transferred(request, transfer))

        num_cached = len(request.nodes)
        self._sink.read(
            # The sink reports by the ticket's request, which for a kept state is the turn before this one.
            replace(ticket, request_id=request.request_id),
            block_ids=request.block_ids[num_cached : len(ticket.block_ids)],
            first_block=num_cached,
            state_slot=request.state_slot,
            deadline_s=self._transfer_deadline_s,
            on_done=on_done,
        )

    def stats(self) -> ServerStats:
        """The engine's figures and those of leases and transfers."""
        return replace(
            self._engine.stats(),
            leases_held=self._source.num_leases,
            leases_ended=dict(self._leases_ended),
            transfers_in_flight=self._sink.num_in_flight,
            transfer_bytes=self._sink.bytes_read,
            transfer_failures=self._failures.counts(),
        )

    def _transferred(self, request: Request, transfer: TransferResult) -> None:
        assert request.ticket is not None
        self._host.answer(self._keeper.let_go, request.ticket)
        request.transfer_s = transfer.seconds
        request.transfer_bytes = transfer.num_bytes
        request.transfer_descriptors = transfer.num_descriptors
        outputs = self._engine.transferred(request, error=transfer.error, settled=transfer.settled)
        if transfer.error is not None:
            self._failures.count(transfer.error)
        elif outputs:  # it came, and is not what was sent
            self._failures.add("digest")
        self._on_read(request, transfer, outputs)

    def _release(self, request_id: str) -> None:
        self._tickets.pop(request_id, None)
        self._engine.release(request_id)

    # --- on the transfer thread ------------------------------------------------------------------

    def _release_soon(self, request_id: str) -> None:
        self._host.post(lambda: self._release(request_id))

    def _lease_ended(self, lease: EndedLease) -> None:
        self._leases_ended[lease.reason] += 1
        self._on_lease_ended(lease)
        self._release_soon(lease.request_id)
