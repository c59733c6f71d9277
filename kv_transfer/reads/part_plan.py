"""Which parts a followed prompt is read in: from what a prefill server tells to what is read where. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.schedule.capacity import blocks_for
from kv_transfer.reads.part import Part
from wire.errors import TransferError
from wire.messages.handoff import PartialTicket, Progress, Ticket


@dataclass(frozen=True)
class Destination:
    """Where a prompt's blocks and its state are to land."""

    block_ids: Sequence[int]
    """Of the whole prompt, in order; none where the model keeps no KV."""
    num_cached: int
    """The first so many hold their content already."""
    state_slot: int
    """Null where the model has no state."""
    block_size: int


class PartPlan:
    """Turns a lease's news, in order, into parts. Raises :class:`TransferError` for news that can't be."""

    def __init__(self, early: PartialTicket, destination: Destination) -> None:
        self._early = early
        self._to = destination
        self._told: list[int] = []

    def part(self, progress: Progress) -> Part | None:
        """What to read of further full blocks; None if all of them are here."""
        self._told += progress.block_ids
        num_full = min(self._early.num_tokens // self._to.block_size, len(self._to.block_ids))
        if len(self._told) > num_full:
            raise TransferError(
                f"{len(self._told)} full blocks were told of a prompt that has {num_full} in "
                f"{self._early.num_tokens} tokens",
                cause="ticket_refused",
            )
        part = self._part_from(len(self._told) - len(progress.block_ids), self._told)
        return part if part.remote_blocks else None

    def last_part(self, ticket: Ticket) -> Part:
        """The blocks that are left, and the state."""
        early = self._early
        if (ticket.lease_id, ticket.epoch, ticket.incarnation, ticket.num_tokens) != (
            early.lease_id,
            early.epoch,
            early.incarnation,
            early.num_tokens,
        ):
            raise TransferError(
                "the ticket that came is not of the lease that was followed", cause="ticket_refused"
            )
        num_blocks = min(blocks_for(early.num_tokens, self._to.block_size), len(self._to.block_ids))
        if len(ticket.block_ids) != num_blocks:
            raise TransferError(
                f"the ticket covers {ticket.num_tokens} tokens in {len(ticket.block_ids)} blocks, "
                f"not in {num_blocks}",
                cause="ticket_refused",
            )
        if list(ticket.block_ids[: len(self._told)]) != self._told:
            raise TransferError("the ticket names other blocks than were told before", cause="ticket_refused")
        return self._part_from(len(self._told), ticket.block_ids, ticket.state_slot)

    def _part_from(self, first: int, remote: Sequence[int], state_slot: int | None = None) -> Part:
        first = max(first, self._to.num_cached)
        ours, theirs = self._to.block_ids[first : len(remote)], remote[first:]
        if state_slot is None:
            return Part(ours, tuple(theirs))
        return Part.last(ours, tuple(theirs), self._to.state_slot, state_slot)
