"""Handoffs of models without states or without KV: the absent part is never named, all else is as usual."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from kv_transfer.handshake import check_same_model
from kv_transfer.reads.part import Part
from kv_transfer.reads.part_plan import Destination, PartPlan
from testing.kv_transfer.pools import SPEC, PoolShape, fill, spec_with, unit_bytes_of
from wire.errors import HandshakeError, TransferError, WireError
from wire.messages.handoff import Done, HandshakeRequest, PartialTicket, Progress, Ticket

STATELESS = PoolShape(spec_with(mamba_layers=0), num_slots=1)
WITHOUT_KV = PoolShape(spec_with(attn_layers=0, kv_heads=0, head_dim=0), num_blocks=1)
PROMPT_S = 15.0


def begin(pair, ticket):
    return pair.decode.sink.begin(ticket.request_id, ticket.incarnation, deadline_s=30.0)


def done_of(ticket):
    return Done(ticket.lease_id, ticket.epoch)


@pytest.mark.parametrize("transport", ["default", "emulated"])
def test_blocks_alone_are_read_in_parts_and_validated_once(make_pair, transport):
    pair = make_pair(STATELESS, transport=transport, seed=4)
    theirs, ours = [4, 5, 9, 1], [11, 12, 3, 7]
    ticket = pair.source.grant("a", theirs, 0)
    transfer = begin(pair, ticket)
    transfer.read_part(Part(ours[:2], theirs[:2]))
    transfer.finish(Part.last(ours[2:], theirs[2:], 0, 0), done_of(ticket))
    result = pair.decode.result()
    assert (result.error, result.num_bytes) == (None, 4 * pair.decode.caches.kv_layout.unit_bytes)
    assert pair.source.next_ended().reason == "done"
    source = STATELESS.caches()
    fill(source, 4)
    assert torch.equal(unit_bytes_of(pair.decode.caches.kv)[ours], unit_bytes_of(source.kv)[theirs])


def test_a_state_alone_is_one_descriptor(make_pair):
    pair = make_pair(WITHOUT_KV, seed=4)
    result = pair.decode.read(pair.source.grant("a", [], 5), [], 2)
    assert (result.error, result.num_descriptors) == (None, 1)
    assert pair.source.next_ended().reason == "done"
    source = WITHOUT_KV.caches()
    fill(source, 4)
    assert torch.equal(unit_bytes_of(pair.decode.caches.state)[2], unit_bytes_of(source.state)[5])


@pytest.mark.parametrize(
    ("shape", "theirs", "ours", "slots"),
    [(STATELESS, [3, 4], [1, 2], (0, 0)), (STATELESS, [], [], (0, 0)), (WITHOUT_KV, [], [], (5, 2))],
    ids=["blocks", "all blocks here already", "a state"],
)
def test_a_lease_that_has_ended_throws_away_what_was_read(make_pair, shape, theirs, ours, slots):
    pair = make_pair(shape)
    ticket = pair.source.grant("a", theirs, slots[0])
    pair.source.end(ticket)
    assert pair.source.next_ended().reason == "ended"
    result = pair.decode.read(ticket, ours, slots[1])
    assert (result.error.cause, result.settled, result.num_bytes) == ("lease_ended", True, 0)


def test_transfers_without_slots_of_their_own_are_validated_side_by_side(make_pair):
    pair = make_pair(STATELESS, decode_shape=dataclasses.replace(STATELESS, num_blocks=64))
    tickets = [pair.source.grant(f"r{i}", [i + 1], 0) for i in range(16)]
    pair.source.end(tickets[5])
    for i, ticket in enumerate(tickets):
        pair.decode.start(ticket, [40 + i], 0)
    results = {result.request_id: result for result in (pair.decode.result() for _ in tickets)}
    assert {name for name, result in results.items() if result.error is not None} == {"r5"}


def test_frozen_servers_take_all_cells_and_the_next_transfer_is_refused(make_pair, own_source):
    """Reads of epochs that do not end; each holds a cell until it does."""
    shape = dataclasses.replace(STATELESS, num_blocks=3)
    pair = make_pair(shape, transport="emulated", source=own_source())
    tickets = [pair.source.grant(f"r{i}", [], 0) for i in range(3)]
    pair.source.freeze()
    for ticket in tickets:
        pair.decode.start(ticket, [], 0, deadline_s=0.2)
    results = [pair.decode.result() for _ in tickets]
    assert [result.error.cause for result in results] == ["deadline"] * 3
    assert sum("do not answer" in result.error.message for result in results) == 1
    assert sorted(result.settled for result in results) == [False, False, True]
    pair.source.thaw()
    assert {pair.decode.settled.get(timeout=PROMPT_S) for _ in range(2)} == {
        result.request_id for result in results if not result.settled
    }
    deadline = time.monotonic() + PROMPT_S
    while (again := pair.decode.read(pair.source.grant("again", [], 0), [], 0)).error is not None:
        assert time.monotonic() < deadline, again.error


@pytest.mark.parametrize(
    ("shape", "blocks", "slot"),
    [(STATELESS, [3], 5), (PoolShape(), [3], 0), (WITHOUT_KV, [3], 5), (WITHOUT_KV, [], 0)],
    ids=["a state too many", "a state too few", "a block too many", "no state at all"],
)
def test_a_ticket_that_names_other_parts_than_the_model_has_is_refused(make_pair, shape, blocks, slot):
    pair = make_pair(shape)
    ticket = pair.source.grant("a", [3] if shape.spec.has_kv else [], shape.last_slot)
    forged = dataclasses.replace(ticket, block_ids=tuple(blocks), state_slot=slot)
    result = pair.decode.read(forged, [1] if shape.spec.has_kv else [], min(2, shape.last_slot))
    assert (result.error.cause, result.settled) == ("ticket_refused", True)
    assert pair.decode.sink.counts.bytes_read == 0


@pytest.mark.parametrize("other", [STATELESS, WITHOUT_KV], ids=["no states", "no KV"])
def test_a_server_that_keeps_another_part_is_refused_and_told_what_is_absent(other):
    def introduction(spec):
        return HandshakeRequest("aa", "fp", 1, spec.kv_layout(5, 8), spec.state_layout(3))

    with pytest.raises(HandshakeError, match="as nothing"):
        check_same_model(introduction(SPEC), introduction(other.spec), "peer")
    check_same_model(introduction(other.spec), introduction(other.spec), "peer")


def plan_of(num_tokens, block_ids, slot):
    early = PartialTicket("a", 5, 2, "127.0.0.1:1", "aa", num_tokens, 60.0)
    return early, PartPlan(early, Destination(block_ids, 0, slot, 4))


def test_a_followed_prompt_without_kv_is_read_all_at_once_at_its_end():
    early, plan = plan_of(9, [], 3)
    assert plan.part(Progress(())) is None
    assert plan.last_part(early.completed((), 7, None)) == Part([], (), (3,), (7,), num_tokens=9)
    with pytest.raises(TransferError, match="prompt of 9 tokens has 0"):
        plan.part(Progress((1,)))


def test_a_followed_prompt_without_states_ends_with_its_last_blocks():
    early, plan = plan_of(9, [11, 12, 13], 0)
    assert plan.part(Progress((1, 2))) == Part([11, 12], (1, 2))
    assert plan.last_part(early.completed((1, 2, 3), 0, None)) == Part([13], (3,), num_tokens=9)


def test_a_ticket_may_lack_a_state_or_blocks_but_its_slot_is_never_negative():
    Ticket("a", 0, 0, "h:1", "i", 9, (), 0, 1.0)
    with pytest.raises(WireError, match="state_slot -1"):
        Ticket("a", 0, 0, "h:1", "i", 9, (1,), -1, 1.0)
