"""A lease ends exactly once, and data that was read without a lease is thrown away."""

import dataclasses

import pytest

from kv_transfer.handshake import with_digest
from kv_transfer.leases.source import EndedLease
from testing.kv_transfer.pools import PoolShape, with_rank
from wire.errors import HandshakeError, TransferError

BLOCKS, SLOT = [3, 4, 5], 2


@pytest.fixture(params=["default", "emulated"])
def pair(request, make_pair):
    return make_pair(transport=request.param)


def test_a_read_ends_the_lease_and_only_that_one(pair):
    first, second = (pair.source.grant(name, BLOCKS, SLOT) for name in ("a", "b"))
    assert pair.source.num_leases() == 2
    assert pair.decode.read(first, BLOCKS, SLOT).error is None
    assert pair.source.next_ended() == EndedLease("a", first.lease_id, first.epoch, "done")
    assert pair.source.num_leases() == 1
    assert pair.decode.read(second, BLOCKS, SLOT).error is None
    assert pair.source.next_ended() == EndedLease("b", second.lease_id, second.epoch, "done")


def test_giving_a_lease_back_ends_it_once(pair):
    ticket = pair.source.grant("a", BLOCKS, SLOT)
    pair.source.end(ticket)
    pair.source.end(ticket)
    assert pair.source.next_ended() == EndedLease("a", ticket.lease_id, ticket.epoch, "ended")
    other = pair.source.grant("b", BLOCKS, SLOT)
    pair.source.end(ticket)  # late, and of a cell that may be another's by now
    assert pair.decode.read(other, BLOCKS, SLOT).error is None
    assert pair.source.next_ended() == EndedLease("b", other.lease_id, other.epoch, "done")


def test_data_read_after_the_lease_has_ended_is_thrown_away(pair):
    ticket = pair.source.grant("a", BLOCKS, SLOT)
    pair.source.end(ticket)
    assert pair.source.next_ended().reason == "ended"
    pair.source.fill(99)  # the blocks are another request's now
    result = pair.decode.read(ticket, BLOCKS, SLOT)
    assert isinstance(result.error, TransferError)
    assert "lease ended" in result.error.message
    assert result.error.cause == "lease_ended"
    assert result.settled
    assert pair.decode.sink.counts.bytes_read == 0


def test_a_late_read_does_not_end_the_lease_that_took_the_cell(pair):
    late = pair.source.grant("a", BLOCKS, SLOT)
    pair.source.end(late)
    pair.source.next_ended()
    held = pair.source.grant("b", BLOCKS, SLOT)
    assert held.lease_id == late.lease_id
    assert held.epoch != late.epoch
    assert pair.decode.read(late, BLOCKS, SLOT).error is not None
    assert pair.decode.read(held, BLOCKS, SLOT).error is None
    assert pair.source.next_ended() == EndedLease("b", held.lease_id, held.epoch, "done")


def test_a_ticket_that_comes_twice_is_worth_something_once(make_pair, make_decode):
    pair = make_pair()
    other = make_decode(PoolShape())
    other.connect(pair.source)
    ticket = pair.source.grant("a", BLOCKS, SLOT)
    assert pair.decode.read(ticket, BLOCKS, SLOT).error is None
    assert pair.source.next_ended().request_id == "a"  # told by a notification, which may take a moment
    for second in (pair.decode, other):
        assert second.read(ticket, BLOCKS, SLOT).error.cause == "lease_ended"


def test_a_reader_whose_agent_was_torn_down_and_rebuilt_reads_on(make_pair, make_decode):
    pair = make_pair()
    ticket = pair.source.grant("a", BLOCKS, SLOT)
    pair.decode.close()
    rebuilt = make_decode(PoolShape())
    rebuilt.connect(pair.source)
    assert rebuilt.read(ticket, BLOCKS, SLOT).error is None


def test_a_lease_that_nobody_reads_expires(make_pair):
    pair = make_pair(lease_ttl_s=0.2)
    ticket = pair.source.grant("a", BLOCKS, SLOT)
    assert ticket.ttl_s == 0.2
    assert pair.source.next_ended() == EndedLease("a", ticket.lease_id, ticket.epoch, "expired")
    assert pair.source.num_leases() == 0
    assert pair.decode.read(ticket, BLOCKS, SLOT).error is not None


def test_cells_are_used_again_with_other_epochs(make_pair):
    pair = make_pair(max_leases=2)
    seen = set()
    for i in range(8):
        ticket = pair.source.grant(f"r{i}", BLOCKS, SLOT)
        assert (ticket.lease_id, ticket.epoch) not in seen
        seen.add((ticket.lease_id, ticket.epoch))
        assert pair.decode.read(ticket, BLOCKS, SLOT).error is None
        assert pair.source.next_ended().request_id == f"r{i}"


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"block_ids": (3, 4, 24)}, "ticket_refused"),
        ({"block_ids": (3, 4, 1 << 62)}, "ticket_refused"),
        ({"block_ids": (3, 4)}, "ticket_refused"),
        ({"block_ids": (3, 4, 5, 6)}, "ticket_refused"),
        ({"state_slot": 8}, "ticket_refused"),
        ({"state_slot": 1 << 62}, "ticket_refused"),
        ({"lease_id": 64}, "ticket_refused"),
        ({"lease_id": 1 << 62}, "ticket_refused"),
        ({"epoch": 5}, "lease_ended"),
        ({"epoch": -1}, "lease_ended"),
        ({"epoch": 1 << 62}, "lease_ended"),
        ({"incarnation": "another life"}, "peer_gone"),
    ],
    ids=str,
)
def test_a_tampered_ticket_is_refused_and_harms_nothing(make_pair, change, cause):
    pair = make_pair()
    ticket = pair.source.grant("a", BLOCKS, SLOT)
    result = pair.decode.read(dataclasses.replace(ticket, **change), [1, 2, 3], 1)
    assert isinstance(result.error, TransferError)
    assert result.error.cause == cause
    assert result.settled
    assert pair.decode.sink.counts.num_in_flight == 0
    assert pair.decode.read(ticket, [1, 2, 3], 1).error is None
    assert pair.source.next_ended() == EndedLease("a", ticket.lease_id, ticket.epoch, "done")


@pytest.mark.parametrize(
    ("block_ids", "slot"), [([0, 2, 3], 1), ([1, 2, 24], 1), ([1, 2, -1], 1), ([1, 2, 3], 0), ([1, 2, 3], 8)]
)
def test_a_destination_outside_our_pools_is_refused(make_pair, block_ids, slot):
    pair = make_pair()
    ticket = pair.source.grant("a", BLOCKS, SLOT)
    assert isinstance(pair.decode.read(ticket, block_ids, slot).error, TransferError)
    assert pair.decode.read(ticket, [1, 2, 3], 1).error is None


def test_a_ticket_of_a_life_that_has_ended_is_refused(make_pair):
    pair = make_pair()
    ticket = pair.source.grant("a", BLOCKS, SLOT)
    pair.source.open(PoolShape())  # a restart at the same address
    pair.decode.connect(pair.source)
    assert not pair.decode.sink.knows(pair.incarnation)
    result = pair.decode.read(ticket, BLOCKS, SLOT)
    assert isinstance(result.error, TransferError)
    assert pair.decode.read(pair.source.grant("b", BLOCKS, SLOT), BLOCKS, SLOT).error is None


def test_a_repeated_handshake_of_the_same_life_changes_nothing(make_pair):
    pair = make_pair()
    tickets = [pair.source.grant(f"r{i}", BLOCKS, i + 1) for i in range(3)]
    for i, ticket in enumerate(tickets):
        pair.decode.start(ticket, BLOCKS, i + 1)
        pair.decode.connect(pair.source)
        assert pair.decode.sink.knows(pair.incarnation)
    assert [pair.decode.result().error for _ in tickets] == [None] * 3


def test_the_source_refuses_another_model_with_both_values(make_decode, shared_source):
    shared_source.open(PoolShape(), fingerprint="theirs")
    decode = make_decode(PoolShape(), fingerprint="ours")
    with pytest.raises(HandshakeError, match=r"ours.*theirs"):
        decode.connect(shared_source)


def test_the_sink_refuses_another_model_with_both_values(make_pair):
    pair = make_pair()
    reply = pair.source.handshake(pair.decode.sink.introduction)
    lying = dataclasses.replace(reply, incarnation="b", fingerprint="theirs")
    with pytest.raises(HandshakeError, match=r"theirs.*fp"):
        pair.decode.sink.add_peer("x:1", with_digest(lying))


@pytest.mark.parametrize("metadata", [b"", b"no metadata", b"nixlSerDes|" + b"\xff" * 40, b"\0" * 100_000])
def test_a_peer_whose_metadata_is_garbage_is_refused(make_pair, metadata):
    pair = make_pair()
    reply = pair.source.handshake(pair.decode.sink.introduction)
    broken = with_digest(dataclasses.replace(with_rank(reply, agent_metadata=metadata), incarnation="b"))
    with pytest.raises(HandshakeError, match="x:1"):
        pair.decode.sink.add_peer("x:1", broken)
    assert not pair.decode.sink.knows("b")
    assert pair.decode.read(pair.source.grant("a", BLOCKS, SLOT), BLOCKS, SLOT).error is None


def test_metadata_of_another_agent_than_the_reply_names_is_refused(make_pair):
    pair = make_pair()
    reply = pair.source.handshake(pair.decode.sink.introduction)
    with pytest.raises(HandshakeError, match=rf"b.*{pair.incarnation}|{pair.incarnation}.*b"):
        pair.decode.sink.add_peer("x:1", with_digest(dataclasses.replace(reply, incarnation="b")))
    assert pair.decode.read(pair.source.grant("a", BLOCKS, SLOT), BLOCKS, SLOT).error is None


def test_an_epoch_table_that_the_peer_has_not_registered_is_refused(make_decode, shared_source):
    shared_source.open(PoolShape())
    decode = make_decode(PoolShape())
    reply = shared_source.handshake(decode.sink.introduction)
    elsewhere = dataclasses.replace(reply.epoch_region, address=4096)
    with pytest.raises(HandshakeError):
        decode.sink.add_peer("x:1", with_digest(dataclasses.replace(reply, epoch_region=elsewhere)))
    decode.connect(shared_source)
    assert decode.read(shared_source.grant("a", BLOCKS, SLOT), BLOCKS, SLOT).error is None


@pytest.mark.parametrize("name", ["kv_region", "state_region"])
def test_memory_that_the_peer_has_not_registered_is_refused(make_decode, shared_source, name):
    shared_source.open(PoolShape())
    decode = make_decode(PoolShape())
    reply = shared_source.handshake(decode.sink.introduction)
    elsewhere = dataclasses.replace(getattr(reply.ranks[0], name), address=4096)
    lying = with_rank(reply, **{name: elsewhere})
    with pytest.raises(HandshakeError, match="can't be read from"):
        decode.sink.add_peer("x:1", lying)
    ticket = shared_source.grant("a", BLOCKS, SLOT)
    decode.connect(shared_source)
    assert decode.read(ticket, BLOCKS, SLOT).error is None
