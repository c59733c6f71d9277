"""gRPC connections to the servers whose memory this server reads: handshakes, leases, progress of prompts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial

import grpc.aio

from kv_transfer.reads.failure_counts import FailureCounts
from kv_transfer.reads.peer_quarantine import PeerQuarantine
from kv_transfer.reads.sink import TransferSink
from wire.channels import Channels
from wire.errors import DeadlineError, HandshakeError, TransferError, TwinfangError, UnavailableError
from wire.messages.handoff import (
    AnyTicket,
    EndLease,
    Follow,
    HandshakeReply,
    PartialTicket,
    Progress,
    RenewedLeases,
    RenewLeases,
    Ticket,
)
from wire.messages.neighbours import BorrowReply, BorrowStart, OfferReply, OfferStart
from wire.repeated_lines import RepeatedLines
from wire.rpc import (
    BORROW_START,
    END_LEASE,
    FOLLOW,
    HANDSHAKE,
    OFFER_START,
    RENEW_LEASES,
    call,
    call_for_replies,
    open_channel,
)

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

RECONNECT_S = 1.0
"""How long a broken channel may take to connect again before a handshake. This is longer than gRPC's pause
between two tries: a server that has just come back must not be given up because of that pause."""


class Peers:
    """One channel per address, one handshake per incarnation. Used only on the event loop."""

    def __init__(
        self,
        sink: TransferSink,
        failures: FailureCounts,
        *,
        timeout_s: float,
        channels: Channels = open_channel,
    ) -> None:
        """``channels`` opens those to the other servers."""
        self._open = channels
        self._sink = sink
        self._failures = failures
        self._timeout_s = timeout_s
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._handshakes: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._quarantine = PeerQuarantine(time.monotonic)

    async def ensure(self, ticket: AnyTicket) -> None:
        """Returns once memory of the ticket's server can be read. Raises the errors of :meth:`reach`."""
        try:
            await self.reach(ticket.address, ticket.incarnation)
        except TwinfangError as error:
            self._failures.count(error)
            raise

    async def reach(self, address: str, incarnation: str) -> None:
        """Returns once memory of a server in this incarnation can be read.

        Raises :class:`HandshakeError` if the server refuses, is in quarantine, or has restarted since then;
        :class:`UnavailableError` or :class:`TransferError` if it can't be reached from here.
        """
        if not self._sink.knows(incarnation):
            self._quarantine.check(address, incarnation)
            await self._connect(address)
        if not self._sink.knows(incarnation):
            raise HandshakeError(
                f"the server at {address} has restarted: its ticket is of incarnation "
                f"{incarnation}, which is gone with all its leases",
                cause="peer_gone",
            )

    async def borrow(self, address: str, ask: BorrowStart, *, timeout_s: float) -> BorrowReply:
        """Asks the server at ``address`` to lend a cached prefix. Raises :class:`TwinfangError`."""
        reply: BorrowReply = await call(self._channel(address), BORROW_START, ask, timeout_s=timeout_s)
        return reply

    async def offer(self, address: str, offer: OfferStart, *, timeout_s: float) -> OfferReply:
        """Offers the server at ``address`` a cached prefix of this one. Raises :class:`TwinfangError`."""
        reply: OfferReply = await call(self._channel(address), OFFER_START, offer, timeout_s=timeout_s)
        return reply

    def connect_soon(self, address: str) -> None:
        """Shakes hands in the background, so that the first request does not wait for the handshake."""
        self._spawn(self._connect_quietly(address))

    def end_lease_soon(self, ticket: AnyTicket) -> None:
        """Tells the ticket's server that nobody will read the lease. If the message is lost, the lease
        expires."""
        self._spawn(self._end_lease(ticket))

    def follow(self, early: PartialTicket) -> AsyncGenerator[Progress | Ticket, None]:
        """Yields the progress of a prompt that another server is still computing, and at last the whole
        ticket.

        Raises :class:`TwinfangError`. There is no deadline: if the server dies, the call ends; if it is
        frozen, gRPC's keepalive ends the call.
        """
        message = Follow(early.incarnation, early.lease_id, early.epoch)
        return call_for_replies(self._channel(early.address), FOLLOW, message, timeout_s=None)

    async def renew(self, address: str, leases: RenewLeases, *, timeout_s: float) -> RenewedLeases:
        """Keeps leases of the server at ``address`` alive. Raises :class:`TwinfangError`."""
        reply: RenewedLeases = await call(self._channel(address), RENEW_LEASES, leases, timeout_s=timeout_s)
        return reply

    async def close(self) -> None:
        tasks = [*self._tasks, *self._handshakes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = self._open(address)
        return self._channels[address]

    async def _connect(self, address: str) -> None:
        """Makes one handshake at a time per address; later callers wait for the same handshake."""
        task = self._handshakes.get(address)
        if task is None:
            task = asyncio.create_task(self._shake_hands(address))
            self._handshakes[address] = task
            task.add_done_callback(lambda _: self._handshakes.pop(address, None))
        await asyncio.shield(task)

    async def _shake_hands(self, address: str) -> None:
        try:
            reply = await self._ask_for_memory(address)
        except UnavailableError as error:
            raise UnavailableError(f"the server at {address} is out of reach: {error.message}") from error
        except DeadlineError as error:  # the handshake's deadline, not the request's: try another server
            raise TransferError(
                f"the server at {address} is out of reach: {error.message}", cause="deadline"
            ) from error
        if not self._sink.knows(reply.incarnation):
            try:
                await asyncio.to_thread(self._sink.add_peer, address, reply)
            except HandshakeError as error:
                if error.cause == "metadata":
                    self._quarantine.put(address, reply.incarnation, error)
                raise
            log.info("connected to server %s, incarnation %s", address, reply.incarnation)

    async def _ask_for_memory(self, address: str) -> HandshakeReply:
        """Sends the handshake. If the channel was broken, waits for a new connection and sends it again."""
        request, channel = self._sink.introduction, self._channel(address)
        ask = partial(call, channel, HANDSHAKE, request, timeout_s=self._timeout_s)
        try:
            reply: HandshakeReply = await ask()
        except UnavailableError:
            with suppress(TimeoutError):  # if the server is gone, the second call's error says why
                async with asyncio.timeout(RECONNECT_S):
                    await channel.channel_ready()
            reply = await ask()
        return reply

    async def _connect_quietly(self, address: str) -> None:
        if self._quarantine.left_s(address) > 0:
            return
        try:
            await self._connect(address)
        except TwinfangError as error:
            if self._quarantine.left_s(address) == 0:
                log.warning("no connection to server %s yet: %s", address, error)

    async def _end_lease(self, ticket: AnyTicket) -> None:
        message = EndLease(ticket.request_id, ticket.lease_id, ticket.epoch)
        try:
            await call(self._channel(ticket.address), END_LEASE, message, timeout_s=self._timeout_s)
        except TwinfangError as error:
            kind = f"a lease at {ticket.address} could not be ended"
            lines.write(logging.WARNING, kind, "request %s: %s: %s", ticket.request_id, kind, error)

    def _spawn(self, coroutine: object) -> None:
        task = asyncio.ensure_future(coroutine)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
