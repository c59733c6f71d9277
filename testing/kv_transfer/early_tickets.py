"""Tickets of prompts that are not completely computed yet."""

from __future__ import annotations

import dataclasses

from wire.messages.handoff import PartialTicket, Ticket

BLOCK_SIZE = 4
SLOT, THEIR_SLOT = 3, 7


def early_ticket(num_tokens):
    return PartialTicket("a", 5, 2, "127.0.0.1:1", "aa", num_tokens, 60.0)


def ticket_of(early, block_ids, **changes):
    fields = {field.name: getattr(early, field.name) for field in dataclasses.fields(early)}
    return Ticket(**(fields | {"block_ids": tuple(block_ids), "state_slot": THEIR_SLOT} | changes))
