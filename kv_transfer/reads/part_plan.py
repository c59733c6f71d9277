"""Turns a prefill server's progress messages into the parts of a followed prompt. Does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.schedule.capacity import blocks_for
from kv_transfer.reads.part import Part
from wire.errors import TransferError
from wire.messages.handoff import PartialTicket, Progress, Ticket, UnitDigests


@dataclass(frozen=True)
class Destination:
    """The place where a prompt's blocks and its state will land."""

    block_ids: Sequence[int]
    """The blocks of the whole prompt, in order; empty if the model keeps no KV."""
    num_cached: int
    """Number of blocks at the start of the prompt that the prefix cache has already filled."""
    state_slot: int
    """Null if the model has no state."""
    block_size: int


class PartPlan:
    """Turns a lease's messages, in order, into parts. Raises :class:`TransferError` for impossible
    messages."""

    def __init__(self, early: PartialTicket, destination: Destination) -> None:
        self._early = early
        self._to = destination
        self._told: list[int] = []

    def part(self, progress: Progress) -> Part | None:
        """Returns the part with those newly full blocks that are not here yet; None if all of them are
        here."""
        self._told += progress.block_ids
        num_full = min(self._early.num_tokens // self._to.block_size, len(self._to.block_ids))
        if len(self._told) > num_full:
            raise TransferError(
                f"the prefill server reported {len(self._told)} full blocks; its prompt of "
                f"{self._early.num_tokens} tokens has {num_full}",
                cause="ticket_refused",
            )
        part = self._part_from(len(self._told) - len(progress.block_ids), progress.digests)
        return part if part.remote_blocks else None

    def last_part(self, ticket: Ticket) -> Part:
        """Returns the part with the remaining blocks and the state."""
        early = self._early
        if (ticket.lease_id, ticket.epoch, ticket.incarnation, ticket.num_tokens) != (
            early.lease_id,
            early.epoch,
            early.incarnation,
            early.num_tokens,
        ):
            raise TransferError(
                "the ticket received belongs to another lease than the one followed", cause="ticket_refused"
            )
        num_blocks = min(blocks_for(early.num_tokens, self._to.block_size), len(self._to.block_ids))
        if len(ticket.block_ids) != num_blocks:
            raise TransferError(
                f"the ticket covers {ticket.num_tokens} tokens in {len(ticket.block_ids)} blocks, "
                f"expected {num_blocks}",
                cause="ticket_refused",
            )
        if list(ticket.block_ids[: len(self._told)]) != self._told:
            raise TransferError("the ticket names other blocks than were reported", cause="ticket_refused")
        first, last = max(len(self._told), self._to.num_cached), len(ticket.block_ids)
        return Part.last(
            self._to.block_ids[first:last],
            ticket.block_ids[first:],
            self._to.state_slot,
            ticket.state_slot,
            digests=ticket.unit_digests,
            num_tokens=ticket.num_tokens,
        )

    def _part_from(self, told: int, digests: Sequence[int]) -> Part:
        """Returns the part with the blocks told after the first ``told``. ``digests`` are all of those
        blocks' or none."""
        first = max(told, self._to.num_cached)
        ours, theirs = self._to.block_ids[first : len(self._told)], self._told[first:]
        units = UnitDigests(tuple(digests[first - told :]), 0) if digests else None
        return Part(ours, tuple(theirs), digests=units)
