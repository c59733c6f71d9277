"""The lending side of the handoff: memory that other servers read under a lease.

Prefill servers lend computed prompts, and to one another cached prefixes in host memory. Decode servers lend
the states that they keep.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import grpc
import torch

from kv_transfer.handshake import check_same_model, with_digest
from kv_transfer.leases.lease_table import Lease, LeaseTable
from kv_transfer.nixl.agent import region_of
from kv_transfer.nixl.poll_thread import idle_delay, poll_delay
from kv_transfer.nixl.transfer_thread import ThreadUser, TransferThread
from wire.codec import PROTOCOL_VERSION, decode
from wire.errors import WireError
from wire.messages.generation import Empty
from wire.messages.handoff import (
    AnyTicket,
    Digests,
    Done,
    EndLease,
    HandshakeReply,
    HandshakeRequest,
    PartialTicket,
    RankMemory,
    RenewedLeases,
    RenewLeases,
    Ticket,
)
from wire.repeated_lines import RepeatedLines
from wire.rpc import END_LEASE, HANDSHAKE, RENEW_LEASES, unary_handler

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

LINGER_S = 5e-3
"""How long to poll often after the last lease has ended, so that its reader learns that ``Done`` has
arrived."""
CONNECT_WINDOW_S = 5.0
"""How long to poll often after a handshake, even with no lease held: a peer connects only while we poll."""
START_TTL_S = 10.0
"""How long a cached prefix in host memory is lent. Its reader gives up sooner."""


@dataclass(frozen=True)
class EndedLease:
    """A lease that is over: its blocks and slot may be reused."""

    request_id: str
    lease_id: int
    epoch: int
    reason: Literal["done", "ended", "expired"]


class SourceListener:
    """Callbacks to the memory's owner, on the transfer thread. This base class ignores every call."""

    def lease_ended(self, lease: EndedLease) -> None:
        """Called once for each lease, after its epoch has changed."""

    def loan_ended(self, lease: EndedLease) -> None:
        """The same for each lease of a cached prefix."""

    def serving(self, is_on: bool) -> None:
        """Called with True when other servers may begin to read, and with False when reads are over."""


class TransferSource(ThreadUser):
    """Owns a lending server's leases. Methods are thread-safe.

    ``thread`` has the memory that is lent. ``introduction`` is the message that this server sends in a
    handshake; other servers reach it at ``address``. ``other_ranks`` is the memory of tensor-parallel ranks 1
    and up, which hold shares of the same blocks and slots.
    """

    def __init__(
        self,
        thread: TransferThread,
        introduction: HandshakeRequest,
        listener: SourceListener,
        *,
        address: str,
        lease_ttl_s: float,
        max_leases: int,
        other_ranks: Sequence[RankMemory] = (),
        max_loans: int = 0,
    ) -> None:
        """``max_loans``: leases of cached prefixes, besides ``max_leases`` others."""
        epochs = torch.zeros(max_leases + max_loans, dtype=torch.int64)
        self._introduction = introduction
        self._listener = listener
        self._address = address
        self._lease_ttl_s = lease_ttl_s
        cells, clock = epochs.numpy(), time.monotonic
        self._first_loan = max_leases
        self._leases = LeaseTable(cells[:max_leases], ttl_s=lease_ttl_s, clock=clock)
        self._loans = LeaseTable(cells[max_leases:], ttl_s=START_TTL_S, clock=clock, first_id=max_leases)
        self._lock = threading.Lock()  # for the lease table: the engine grants, several threads end leases
        self._thread = thread
        thread.agent.register(epochs)
        self._reply = with_digest(
            HandshakeReply(
                incarnation=introduction.incarnation,
                fingerprint=introduction.fingerprint,
                ranks=(thread.memory, *other_ranks),
                epoch_region=region_of(epochs),
                protocol=PROTOCOL_VERSION,
            )
        )
        self._is_serving = False
        self._last_news_s = 0.0
        self._connect_until_s = 0.0
        self._reader_until_s = 0.0
        self._last_unread_s = -math.inf

    @property
    def num_leases(self) -> int:
        return len(self._leases) + len(self._loans)

    def handshake(self, request: HandshakeRequest) -> HandshakeReply:
        """Returns all that a reader needs to read from here.

        Raises :class:`HandshakeError` if the two servers may not share state.
        """
        check_same_model(self._introduction, request, f"decode server {request.incarnation}")
        self._thread.post(self._expect_connection)
        return self._reply

    def grant(
        self,
        request_id: str,
        *,
        num_tokens: int,
        block_ids: Sequence[int],
        state_slot: int,
        digests: Digests | None = None,
    ) -> Ticket:
        """Leases a prefilled request's blocks and slot, which stay unchanged until the lease has ended."""
        self._thread.post(self._expect_reader)
        return self.keep(
            request_id, num_tokens=num_tokens, block_ids=block_ids, state_slot=state_slot, digests=digests
        )

    def keep(
        self,
        request_id: str,
        *,
        num_tokens: int,
        block_ids: Sequence[int],
        state_slot: int,
        digests: Digests | None = None,
    ) -> Ticket:
        """Like :meth:`grant`, without expecting a reader: a reader announces itself by renewing the lease."""
        with self._lock:
            lease = self._leases.grant(request_id)
        return self._early_ticket(lease, num_tokens).completed(block_ids, state_slot, digests)

    def open(self, request_id: str, *, num_tokens: int) -> PartialTicket:
        """Leases a prompt that is still being computed. A block stays unchanged once it was reported full."""
        with self._lock:
            lease = self._leases.open(request_id)
        self._thread.post(self._expect_reader)
        return self._early_ticket(lease, num_tokens)

    def _early_ticket(self, lease: Lease, num_tokens: int) -> PartialTicket:
        return PartialTicket(
            request_id=lease.request_id,
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            address=self._address,
            incarnation=self._introduction.incarnation,
            num_tokens=num_tokens,
            ttl_s=self._lease_ttl_s,
        )

    def settle(
        self,
        early: PartialTicket,
        *,
        block_ids: Sequence[int],
        state_slot: int,
        digests: Digests | None = None,
    ) -> Ticket | None:
        """Returns the whole ticket of an open lease whose prompt is computed; None if the lease has ended."""
        with self._lock:
            is_settled = self._leases.settle(early.lease_id, early.epoch)
        self._thread.post(self._expect_reader)
        return early.completed(block_ids, state_slot, digests) if is_settled else None

    def lend(self, name: str) -> Lease:
        """Leases a cached prefix, whose pages stay unchanged until the lease has ended."""
        with self._lock:
            lease = self._loans.grant(name)
        self._thread.post(self._expect_reader)
        return lease

    def _table_of(self, lease_id: int) -> LeaseTable:
        return self._leases if lease_id < self._first_loan else self._loans

    def revoke(self, ticket: AnyTicket) -> None:
        """Ends a lease before this call returns, because its memory is about to be reused."""
        with self._lock:
            lease = self._leases.end(ticket.lease_id, ticket.epoch)
        if lease is not None:
            self._thread.post(lambda: self._tell(lease, "ended"))

    def end(self, message: EndLease) -> None:
        """Ends a lease before it is read. Does nothing if the lease has already ended."""
        self._thread.post(lambda: self._end(message.lease_id, message.epoch, "ended"))

    def renew(self, message: RenewLeases) -> RenewedLeases:
        """Restarts the time to live of leases whose reader still waits for room or is about to read."""
        with self._lock:
            ended = [one for one, epoch in message.leases if not self._leases.renew(one, epoch)]
        self._thread.post(self._expect_reader)
        return RenewedLeases(tuple(ended))

    # --- on the transfer thread ------------------------------------------------------------------

    def poll(self) -> float:
        with self._lock:
            expired = [*self._leases.end_expired(), *self._loans.end_expired()]
        for lease in expired:
            self._tell(lease, "expired")
        now = time.monotonic()
        is_serving = self._expects_reads(now)
        if self._is_serving != is_serving:
            self._is_serving = is_serving
            self._listener.serving(is_serving)
        return poll_delay(now - self._last_news_s) if is_serving else idle_delay(now - self._last_unread_s)

    def _expects_reads(self, now: float) -> bool:
        """Whether a reader may be reading, connecting, or waiting to see that its ``Done`` has arrived."""
        if self.num_leases > 0 and now < self._reader_until_s:
            return True
        return now <= max(self._connect_until_s, self._last_news_s + LINGER_S)

    def notified(self, sender: str, message: bytes) -> None:
        try:
            done = decode(message, Done)
        except WireError as error:
            kind = f"a notification from {sender} can't be decoded"
            lines.write(logging.WARNING, kind, "%s: %s", kind, error)
            return
        self._end(done.lease_id, done.epoch, "done")

    def _end(self, lease_id: int, epoch: int, reason: Literal["done", "ended"]) -> None:
        with self._lock:
            lease = self._table_of(lease_id).end(lease_id, epoch)
        self._note_news()
        if lease is None:
            log.debug("lease %d, epoch %d, had already ended", lease_id, epoch)
        else:
            self._tell(lease, reason)

    def _tell(self, lease: Lease, reason: Literal["done", "ended", "expired"]) -> None:
        if reason != "done":
            self._last_unread_s = time.monotonic()
        ended = EndedLease(lease.request_id, lease.lease_id, lease.epoch, reason)
        if lease.lease_id < self._first_loan:
            self._listener.lease_ended(ended)
        else:
            self._listener.loan_ended(ended)

    def _note_news(self) -> None:
        self._last_news_s = time.monotonic()

    def _expect_reader(self) -> None:
        """Expects reads for as long as one lease's time to live. A reader that needs longer renews its
        lease before that time is over."""
        self._note_news()
        self._reader_until_s = self._last_news_s + self._lease_ttl_s

    def _expect_connection(self) -> None:
        self._note_news()
        self._connect_until_s = self._last_news_s + CONNECT_WINDOW_S


def transfer_handlers(source: TransferSource) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """Returns handlers of :data:`wire.rpc.TRANSFER_SERVICE` by method name: handshake, renewal, early end."""

    async def handshake(message: HandshakeRequest, _context: Any) -> HandshakeReply:
        return await asyncio.to_thread(source.handshake, message)

    async def end_lease(message: EndLease, _context: Any) -> Empty:
        source.end(message)
        return Empty()

    async def renew_leases(message: RenewLeases, _context: Any) -> RenewedLeases:
        return source.renew(message)

    return {
        HANDSHAKE.name: unary_handler(HANDSHAKE, handshake),
        END_LEASE.name: unary_handler(END_LEASE, end_lease),
        RENEW_LEASES.name: unary_handler(RENEW_LEASES, renew_leases),
    }
