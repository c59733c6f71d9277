"""Wrong bits in handshakes, tickets and leases end no process; what is damaged is refused."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging

import pytest

from kv_transfer.handshake import check_digest, digest_of
from kv_transfer.leases.progress_feed import ProgressFeeds
from kv_transfer.reads.failure_counts import FailureCounts
from kv_transfer.reads.peer_quarantine import MAX_SERVERS, QUARANTINE_S, PeerQuarantine
from kv_transfer.reads.peers import Peers
from testing.kv_transfer.damage import (
    flips,
    introduction,
    num_deaths,
    outcome_of,
    some_flips,
    take_handshakes,
    take_tickets,
    without_digest,
)
from testing.kv_transfer.pools import PoolShape
from testing.kv_transfer.source_process import SourceProcess
from wire.codec import decode, encode
from wire.errors import HandshakeError, LeaseError, TwinfangError
from wire.messages.handoff import (
    EndLease,
    Follow,
    HandshakeReply,
    PartialTicket,
    Progress,
    RenewLeases,
    Ticket,
)

BLOCKS, SLOT = [3, 5, 6], 4


@pytest.fixture
def reply(shared_source: SourceProcess) -> HandshakeReply:
    """The handshake of a real source."""
    shared_source.open(PoolShape())
    return shared_source.handshake(introduction("victim"))


def test_no_bit_of_a_handshake_can_change_unseen(reply):
    data = encode(reply)
    num_decoded = 0
    for damaged in flips(data):
        try:
            read = decode(damaged, HandshakeReply)
        except TwinfangError:
            continue
        num_decoded += 1
        if dataclasses.replace(read, protocol=reply.protocol) == reply:
            continue  # only its protocol version
        with pytest.raises(HandshakeError, match="damaged on its way"):
            check_digest(read, "a server")
    assert num_decoded > 8 * len(reply.ranks[0].agent_metadata)


def test_a_sink_survives_damaged_handshakes_and_takes_the_sound_one(reply):
    data = encode(reply)
    metadata = reply.ranks[0].agent_metadata
    of_metadata = [
        encode(dataclasses.replace(reply, ranks=(dataclasses.replace(reply.ranks[0], agent_metadata=one),)))
        for one in some_flips(metadata, 40)
    ]
    outcomes, sound = outcome_of(take_handshakes, "victim", of_metadata + some_flips(data, 80), data)
    assert sound == "accepted"
    assert outcomes["metadata"] >= 40
    assert outcomes["accepted"] == 0


@pytest.mark.exhaustive
def test_a_sink_survives_every_damaged_byte_of_a_handshake(reply):
    data = encode(reply)
    outcomes, sound = outcome_of(take_handshakes, "victim", list(flips(data, [1, 16, 128, 255])), data)
    assert sound == "accepted"
    assert outcomes["accepted"] <= 4  # the protocol version of the message is not digested
    assert outcomes["metadata"] > 4 * len(reply.ranks[0].agent_metadata)


@pytest.mark.exhaustive
def test_without_the_digest_some_bytes_end_the_reader(reply):
    """What the digest is for. NIXL 1.5 with UCX 1.23 dies of about one byte in a hundred."""
    total, deaths = num_deaths(without_digest(reply), [255])
    print(f"{deaths} of {total} flips ended the process")
    assert 0 < deaths < total


def test_wrong_bits_in_tickets_and_notifications_end_no_process(shared_source):
    shared_source.open(PoolShape(), max_leases=8)
    handshake = encode(shared_source.handshake(introduction("victim")))
    ticket = shared_source.grant("r", BLOCKS, SLOT)
    outcomes, sound = outcome_of(take_tickets, "victim", handshake, ticket)
    assert sound in ("read", "lease_ended")  # a damaged id can be that of the lease itself
    assert {"wire_error", "ticket_refused", "peer_gone"} & set(outcomes)
    assert shared_source.num_leases() <= 1


@pytest.mark.parametrize("message", [EndLease("r", 0, 1), RenewLeases(((0, 1), (1, 2)))], ids=repr)
def test_wrong_bits_in_messages_about_leases_end_no_process(shared_source, message):
    shared_source.open(PoolShape(), max_leases=8)
    for lease in range(3):
        shared_source.grant(f"r{lease}", BLOCKS, SLOT)
    for damaged in flips(encode(message), [1, 64, 255]):
        with contextlib.suppress(TwinfangError):
            shared_source.take(decode(damaged, type(message)))
    assert shared_source.num_leases() <= 3


async def test_wrong_bits_in_messages_about_progress_end_no_feed():
    feeds = ProgressFeeds("source")
    early = PartialTicket("r", 3, 7, "127.0.0.1:1", "source", 40, 60.0)
    feeds.open(early)
    feeds.add(early, (4, 5))
    for damaged in flips(encode(Follow("source", 3, 7)), [1, 64, 255]):
        try:
            follow = decode(damaged, Follow)
        except TwinfangError:
            continue
        with pytest.raises(LeaseError):
            await anext(feeds.follow(follow))
    for damaged in flips(encode(Progress((4, 5))), [1, 64, 255]):
        with contextlib.suppress(TwinfangError):
            decode(damaged, Progress)
    assert await anext(feeds.follow(Follow("source", 3, 7))) == Progress((4, 5))


# --- quarantine -------------------------------------------------------------------------------------


def test_a_handshake_of_the_last_release_has_no_digest_and_is_taken(reply):
    check_digest(without_digest(reply), "a server")
    outcomes, sound = outcome_of(take_handshakes, "victim", [], encode(without_digest(reply)))
    assert (sum(outcomes.values()), sound) == (0, "accepted")


def test_the_digest_does_not_depend_on_fields_of_later_releases(reply):
    assert digest_of(dataclasses.replace(reply, protocol=99)) == reply.digest


async def test_a_server_with_damaged_handshakes_is_asked_once_and_others_are_not_affected(
    sink, reply, monkeypatch, caplog
):
    damaged = dataclasses.replace(reply, epoch_region=dataclasses.replace(reply.epoch_region, device_id=1))
    asked = []

    async def answer(*_arguments, **_settings):
        asked.append(1)
        return damaged

    monkeypatch.setattr("kv_transfer.reads.peers.call", answer)
    failures = FailureCounts()
    peers = Peers(sink, failures, timeout_s=5.0)
    ticket = Ticket("r", 0, 1, "127.0.0.1:1", reply.incarnation, 16, (1,), 1, 1.0)
    with caplog.at_level(logging.WARNING):
        with pytest.raises(HandshakeError, match="damaged on its way"):
            await peers.ensure(ticket)
        for _ in range(3):
            with pytest.raises(HandshakeError, match="in quarantine for"):
                await peers.ensure(ticket)
        peers.connect_soon(ticket.address)
        await asyncio.gather(*peers._tasks)
    assert len(asked) == 1
    assert failures.counts()["metadata"] == 4
    assert [one.message.split(",")[0] for one in caplog.records] == [
        f"server 127.0.0.1:1 is in quarantine for {QUARANTINE_S:.0f} s"
    ]
    later = dataclasses.replace(ticket, incarnation="later")
    with pytest.raises(HandshakeError, match="damaged on its way"):  # asked again: it has restarted
        await peers.ensure(later)
    assert len(asked) == 2
    await peers.close()


def test_quarantine_ends_and_is_bounded():
    now = 0.0
    quarantine = PeerQuarantine(lambda: now)
    error = HandshakeError("damaged", cause="metadata")
    for number in range(MAX_SERVERS + 1):
        quarantine.put(f"host:{number}", "aa", error)
    assert quarantine.left_s("host:0") == 0
    assert quarantine.left_s("host:1", "aa") == QUARANTINE_S
    assert quarantine.left_s("host:1", "bb") == 0
    quarantine.put("host:1", "bb", error)
    now = QUARANTINE_S
    quarantine.check("host:1", "bb")
