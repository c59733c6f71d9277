"""Turns a prefill server's progress messages into the parts of a followed prompt. Does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.schedule.capacity import blocks_for
from kv_transfer.reads.part import Part
from wire.errors import TransferError
from wire.messages.handoff import PartialTicket, Progress, Ticket


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
        part = self._part_from(len(self._told) - len(progress.block_ids), self._told)
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
        return self._part_from(len(self._told), ticket.block_ids, ticket.state_slot)

    def _part_from(self, first: int, remote: Sequence[int], state_slot: int | None = None) -> Part:
        first = max(first, self._to.num_cached)
        ours, theirs = self._to.block_ids[first : len(remote)], remote[first:]
        if state_slot is None:
            return Part(ours, tuple(theirs))
        return Part.last(ours, tuple(theirs), self._to.state_slot, state_slot)
