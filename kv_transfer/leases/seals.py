"""Puts digests of what is lent into tickets and progress messages, so that readers can verify what arrives.

Blocks of a prompt that is still being computed are digested as they become full. The ticket then waits only
for the last blocks and the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from engine.memory.index_pool import NULL_INDEX
from kv_transfer.digester import Digester
from wire.messages.handoff import AnyTicket, Ticket, UnitDigests

OnProgress = Callable[[Sequence[int], tuple[int, ...]], None]
"""Gets full blocks and their digests."""
OnTicket = Callable[[Ticket], None]
Answer = Callable[..., None]
"""Runs a function with its arguments on the event loop."""


class Seals(Protocol):
    """Used on the engine's thread, which does not wait. Callbacks run on the event loop, for one lease in the
    order of the calls."""

    def progress(self, early: AnyTicket, block_ids: Sequence[int], then: OnProgress) -> None:
        """Takes blocks of a leased prompt that are full now."""

    def seal(self, ticket: Ticket, then: OnTicket) -> None:
        """Completes a ticket: its memory is computed and leased."""

    def drop(self, ticket: AnyTicket) -> None:
        """Forgets a lease whose prompt was not computed to its end."""


class NoSeals:
    """Passes everything on without digests."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def progress(self, _early: AnyTicket, block_ids: Sequence[int], then: OnProgress) -> None:
        self._answer(then, block_ids, ())

    def seal(self, ticket: Ticket, then: OnTicket) -> None:
        self._answer(then, ticket)

    def drop(self, ticket: AnyTicket) -> None:
        pass


class DigestSeals:
    """Digests short handoffs on the event loop, and all others on the digesting thread.

    With ``only_quick``, a ticket that would have to wait for long digests goes out without any.
    """

    def __init__(self, digester: Digester, answer: Answer, *, only_quick: bool) -> None:
        self._digester = digester
        self._only_quick = only_quick
        self._answer = answer
        self._followed: set[tuple[int, int]] = set()
        """Leases with an early ticket. Used on the engine's thread."""
        self._digests: dict[tuple[int, int], list[int]] = {}
        """Digests of their full blocks. Used on the digesting thread."""

    def progress(self, early: AnyTicket, block_ids: Sequence[int], then: OnProgress) -> None:
        lease, blocks = _lease(early), list(block_ids)
        self._followed.add(lease)

        def digest() -> None:
            digests = self._digester.blocks(blocks)
            self._digests.setdefault(lease, []).extend(digests)
            self._answer(then, blocks, digests)

        self._digester.post(digest)

    def seal(self, ticket: Ticket, then: OnTicket) -> None:
        lease = _lease(ticket)
        if lease in self._followed:
            self._followed.discard(lease)
            self._digester.post(
                lambda: self._answer(then, self._sealed(ticket, self._digests.pop(lease, [])))
            )
        elif self._only_quick or self._digester.is_quick(len(ticket.block_ids), 1):
            self._answer(lambda: then(self._sealed(ticket, [])))
        else:
            self._digester.post(lambda: self._answer(then, self._sealed(ticket, [])))

    def drop(self, ticket: AnyTicket) -> None:
        lease = _lease(ticket)
        if lease in self._followed:
            self._followed.discard(lease)
            self._digester.post(partial(self._forget, lease))

    def _forget(self, lease: tuple[int, int]) -> None:
        self._digests.pop(lease, None)

    def _sealed(self, ticket: Ticket, known: list[int]) -> Ticket:
        """Returns the ticket with digests. ``known`` are those of its first blocks."""
        rest = ticket.block_ids[len(known) :]
        if self._only_quick and not self._digester.is_quick(len(rest), 1):
            return ticket
        last_tokens = ticket.num_tokens % self._digester.block_size if rest else 0
        state = 0 if ticket.state_slot == NULL_INDEX else self._digester.state(ticket.state_slot)
        blocks = (*known, *self._digester.blocks(rest, last_tokens))
        return replace(ticket, unit_digests=UnitDigests(blocks, state))


def _lease(ticket: AnyTicket) -> tuple[int, int]:
    return ticket.lease_id, ticket.epoch


def make_seals(digester: Digester | None, answer: Answer, *, only_quick: bool) -> Seals:
    """Returns seals that use ``digester``; without one, tickets get no digests."""
    return NoSeals(answer) if digester is None else DigestSeals(digester, answer, only_quick=only_quick)
