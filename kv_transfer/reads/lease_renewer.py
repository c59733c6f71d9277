"""Keeps alive the leases of requests that wait for room here.

A lease expires if its reader is dead, not if the reader's queue is long: a burst of requests on a small
server must not lose its prompts to a deadline (tokenspeed PR 1427). While a request waits, its lease is
renewed several times within its time to live. One call renews all leases of one server. A process that dies
renews nothing, so its leases expire.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from wire.errors import TwinfangError
from wire.messages.handoff import AnyTicket, RenewedLeases, RenewLeases
from wire.repeated_lines import RepeatedLines

log = logging.getLogger(__name__)
lines = RepeatedLines(log)

RENEWALS_PER_LIFETIME = 3
"""Two renewals in a row may be lost before the lease expires."""


class Peers(Protocol):
    """The object that calls other servers."""

    async def renew(self, address: str, leases: RenewLeases, *, timeout_s: float) -> RenewedLeases:
        """Keeps leases of the server at ``address`` alive. Raises :class:`TwinfangError`."""


@dataclass
class _Held:
    ticket: AnyTicket
    due: float
    """When the lease has to be renewed next, in the event loop's time."""

    @property
    def interval_s(self) -> float:
        return self.ticket.ttl_s / RENEWALS_PER_LIFETIME


class LeaseRenewer:
    """Renews the leases of tickets whose read has not ended. Used only on the event loop."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._held: dict[tuple[str, int, int], _Held] = {}
        self._joined = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, ticket: AnyTicket) -> None:
        """Renews the ticket's lease from now on, until :meth:`let_go`."""
        held = _Held(ticket, 0.0)
        held.due = asyncio.get_running_loop().time() + held.interval_s
        self._held[lease_of(ticket)] = held
        self._joined.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._renew_while_any())

    def announce(self, ticket: AnyTicket) -> None:
        """Like :meth:`hold`, with a first renewal at once: the ticket's server expected no reader so far."""
        self.hold(ticket)
        self._held[lease_of(ticket)].due = 0.0

    def let_go(self, ticket: AnyTicket) -> None:
        """Stops renewing: the read has ended or will never begin."""
        self._held.pop(lease_of(ticket), None)

    async def close(self) -> None:
        self._held.clear()
        tasks = [*self._calls, *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _renew_while_any(self) -> None:
        """Renews leases that are due, and ends once no lease is held, so that an idle server has no timer."""
        loop = asyncio.get_running_loop()
        while self._held:
            self._joined.clear()
            pause_s = max(0.0, min(held.due for held in self._held.values()) - loop.time())
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._joined.wait()
            for address, tickets in self._take_due(loop.time()).items():
                # Not awaited: a frozen server would delay the renewals at other servers.
                call = asyncio.create_task(self._renew(address, tickets))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)

    def _take_due(self, now: float) -> dict[str, list[AnyTicket]]:
        """Returns the tickets to renew now, by their server's address.

        A server at which one lease is due has all those renewed that are due within half an interval. So
        leases that were taken one after another come to be renewed together.
        """
        called = {held.ticket.address for held in self._held.values() if held.due <= now}
        taken: dict[str, list[AnyTicket]] = defaultdict(list)
        for held in self._held.values():
            soon = held.due <= now + held.interval_s / 2
            if soon and held.ticket.address in called:
                held.due = now + held.interval_s
                taken[held.ticket.address].append(held.ticket)
        return taken

    async def _renew(self, address: str, held: list[AnyTicket]) -> None:
        timeout_s = min(ticket.ttl_s for ticket in held) / RENEWALS_PER_LIFETIME
        message = RenewLeases(tuple((ticket.lease_id, ticket.epoch) for ticket in held))
        try:
            reply = await self._peers.renew(address, message, timeout_s=timeout_s)
        except TwinfangError as error:
            log.warning("%d leases of %s were not renewed: %s", len(held), address, error)
            return
        for ticket in held:
            if ticket.lease_id in reply.ended and lease_of(ticket) in self._held:
                kind = f"a lease at {address} had ended before"
                lines.write(logging.WARNING, kind, "request %s: %s", ticket.request_id, kind)
                self.let_go(ticket)


def lease_of(ticket: AnyTicket) -> tuple[str, int, int]:
    """Returns the key of the ticket's lease, unique among the leases of all servers."""
    return ticket.incarnation, ticket.lease_id, ticket.epoch
