"""A transfer in parts: blocks are read when they are reported, and one read of the epoch validates all
parts."""

from __future__ import annotations

import queue
import time

import pytest
import torch

from kv_transfer.reads.part import Part
from testing.kv_transfer.pools import POISON, PoolShape, fill, unit_bytes_of
from wire.errors import TransferError
from wire.messages.handoff import Done

PROMPT_S = 15.0
SLOT = 2
LARGE = PoolShape(num_blocks=513, block_size=64)


def begin(pair, ticket, deadline_s=30.0):
    return pair.decode.sink.begin(ticket.request_id, ticket.incarnation, deadline_s=deadline_s)


def last_of(ticket, ours, first):
    return Part(ours[first:], ticket.block_ids[first:], [SLOT], [ticket.state_slot])


def wait_for_parts(decode, count):
    deadline = time.monotonic() + PROMPT_S
    while decode.sink.counts.num_parts < count:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("transport", ["default", "emulated"])
def test_parts_land_where_they_belong_and_one_notification_ends_the_lease(make_pair, transport):
    pair = make_pair(transport=transport, seed=9)
    theirs, ours = [4, 5, 9, 1, 2, 3, 7], [11, 12, 13, 3, 9, 10, 1]
    ticket = pair.source.grant("a", theirs, 5)
    transfer = begin(pair, ticket)
    transfer.read_part(Part(ours[:3], theirs[:3]))
    transfer.read_part(Part(ours[3:5], theirs[3:5]))
    wait_for_parts(pair.decode, 2)
    assert pair.decode.results.empty(), "data alone is no result"
    assert pair.source.num_leases() == 1
    transfer.finish(last_of(ticket, ours, 5), Done(ticket.lease_id, ticket.epoch))
    result = pair.decode.result()
    block, slot = pair.decode.caches.kv_layout.unit_bytes, pair.decode.caches.state_layout.unit_bytes
    assert (result.error, result.settled) == (None, True)
    assert (result.early_bytes, result.num_bytes) == (5 * block, 7 * block + slot)
    assert pair.decode.sink.counts.early_bytes == 5 * block
    assert pair.source.next_ended().reason == "done"
    source = PoolShape().caches()
    fill(source, 9)
    assert torch.equal(unit_bytes_of(pair.decode.caches.kv)[ours], unit_bytes_of(source.kv)[theirs])
    assert torch.equal(unit_bytes_of(pair.decode.caches.state)[SLOT], unit_bytes_of(source.state)[5])
    untouched = [i for i in range(1, 24) if i not in ours]
    assert (unit_bytes_of(pair.decode.caches.kv)[untouched] == POISON).all()


def test_a_lease_that_ends_between_two_parts_throws_all_of_them_away(make_pair):
    pair = make_pair()
    ticket = pair.source.grant("a", [3, 4], 5)
    transfer = begin(pair, ticket)
    transfer.read_part(Part([1], [3]))
    wait_for_parts(pair.decode, 1)
    pair.source.end(ticket)
    assert pair.source.next_ended().reason == "ended"
    transfer.finish(last_of(ticket, [1, 2], 1), Done(ticket.lease_id, ticket.epoch))
    result = pair.decode.result()
    assert (result.error.cause, result.settled, result.num_bytes) == ("lease_ended", True, 0)
    assert pair.decode.sink.counts.bytes_read == 0


def test_a_part_that_can_t_be_read_fails_the_transfer_and_what_follows_is_not_read(make_pair):
    pair = make_pair()
    ticket = pair.source.grant("a", [3, 4], 5)
    transfer = begin(pair, ticket)
    transfer.read_part(Part([1], [24]))
    result = pair.decode.result()
    assert (result.error.cause, result.settled) == ("ticket_refused", True)
    transfer.read_part(Part([2], [4]))
    transfer.finish(last_of(ticket, [1, 2], 1), Done(ticket.lease_id, ticket.epoch))
    assert pair.decode.read(ticket, [6, 7], 3).error is None
    assert (unit_bytes_of(pair.decode.caches.kv)[2] == POISON).all()
    assert pair.decode.results.empty()


def test_a_transfer_that_waits_for_news_is_not_late(make_pair):
    """The transfer's deadline counts only while there is something to read."""
    pair = make_pair()
    ticket = pair.source.grant("a", [3, 4], 5)
    transfer = begin(pair, ticket, deadline_s=0.1)
    transfer.read_part(Part([1], [3]))
    with pytest.raises(queue.Empty):
        pair.decode.result(0.4)
    transfer.finish(last_of(ticket, [1, 2], 1), Done(ticket.lease_id, ticket.epoch))
    assert pair.decode.result().error is None


def test_a_transfer_that_is_given_up_before_anything_is_read_is_settled(make_pair):
    pair = make_pair()
    ticket = pair.source.grant("a", [3], 5)
    transfer = begin(pair, ticket)
    transfer.fail(TransferError("not wanted"))
    result = pair.decode.result()
    assert (result.error.message, result.settled) == ("not wanted", True)
    assert pair.decode.sink.counts.num_in_flight == 0


def test_several_parts_of_a_frozen_source_stay_in_quarantine_until_all_have_ended(make_pair, own_source):
    pair = make_pair(LARGE, transport="emulated", source=own_source())
    blocks = list(range(1, 513))
    ticket = pair.source.grant("a", blocks, SLOT)
    pair.source.freeze()
    transfer = begin(pair, ticket, deadline_s=0.2)
    for start in range(0, 512, 128):
        transfer.read_part(Part(blocks[start : start + 128], blocks[start : start + 128]))
    result = pair.decode.result()
    assert (result.error.cause, result.settled) == ("deadline", False)
    with pytest.raises(queue.Empty):
        pair.decode.settled.get(timeout=0.2)
    pair.source.thaw()
    assert pair.decode.settled.get(timeout=PROMPT_S) == "a"
    assert pair.decode.settled.empty()
    assert pair.decode.results.empty()
    assert not (unit_bytes_of(pair.decode.caches.kv)[1:] == POISON).all()


def test_a_source_killed_between_parts_fails_the_transfer_at_the_next(make_pair, own_source):
    pair = make_pair(transport="emulated", source=own_source())
    ticket = pair.source.grant("a", [3, 4], 5)
    transfer = begin(pair, ticket)
    transfer.read_part(Part([1], [3]))
    wait_for_parts(pair.decode, 1)
    pair.source.kill()
    transfer.read_part(Part([2], [4]))
    result = pair.decode.result(PROMPT_S)
    assert (result.error.cause, result.settled) == ("peer_gone", True)
