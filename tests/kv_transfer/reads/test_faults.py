"""A peer that is killed, frozen, restarted or faulty makes only its own transfers fail."""

import contextlib
import dataclasses
import os
import queue
import threading
import time

import pytest
import torch

from kv_transfer.handshake import with_digest
from kv_transfer.nixl import peer_memories
from kv_transfer.nixl.agent import TransferAgent
from testing.conditions import wait_until
from testing.kv_transfer.pools import POISON, PoolShape, unit_bytes_of, with_rank
from wire.errors import HandshakeError, TransferError

BLOCKS, SLOT = [3, 4, 5], 2
PROMPT_S = 15.0
"""Far below the deadline of the reads, far above what a loaded machine needs."""
LARGE = PoolShape(num_blocks=513, block_size=64)
"""64 KB a block: 32 MB, which can't be on their way already when the peer is stopped."""


def untouched(decode):
    return all((unit_bytes_of(pool)[1:] == POISON).all() for pool in (decode.caches.kv, decode.caches.state))


@pytest.mark.parametrize("transport", ["default", "emulated"])
def test_a_source_killed_before_the_read_fails_it_at_once(make_pair, own_source, transport):
    pair = make_pair(transport=transport, source=own_source())
    ticket = pair.source.grant("a", BLOCKS, SLOT)
    pair.source.kill()
    pair.decode.start(ticket, BLOCKS, SLOT)
    result = pair.decode.result(PROMPT_S)
    assert isinstance(result.error, TransferError)
    assert result.error.cause == "peer_gone"
    assert result.settled
    assert untouched(pair.decode)


def test_a_source_killed_during_the_read_fails_it_at_once(make_pair, own_source):
    pair = make_pair(LARGE, transport="emulated", source=own_source())
    ticket = pair.source.grant("a", list(range(1, 513)), SLOT)
    pair.source.freeze()
    pair.decode.start(ticket, list(range(1, 513)), SLOT)
    with pytest.raises(queue.Empty):
        pair.decode.result(0.05)
    pair.source.kill()
    result = pair.decode.result(PROMPT_S)
    assert isinstance(result.error, TransferError)
    assert result.error.cause == "peer_gone"
    assert result.settled


def test_a_killed_source_is_met_anew_after_its_restart(make_pair, own_source):
    pair = make_pair(source=own_source())
    ticket = pair.source.grant("a", BLOCKS, SLOT)
    pair.source.kill()
    assert pair.decode.read(ticket, BLOCKS, SLOT).error is not None
    assert not pair.decode.sink.knows(pair.incarnation)
    second = own_source()
    second.open(PoolShape(), seed=4)
    pair.decode.connect(second)
    assert pair.decode.read(second.grant("b", BLOCKS, SLOT), BLOCKS, SLOT).error is None


def test_a_frozen_source_misses_the_deadline_and_its_late_bytes_stay_in_quarantine(make_pair, own_source):
    pair = make_pair(LARGE, transport="emulated", source=own_source())
    blocks = list(range(1, 513))
    ticket = pair.source.grant("a", blocks, SLOT)
    pair.source.freeze()
    result = pair.decode.read(ticket, blocks, SLOT, deadline_s=0.2)
    assert isinstance(result.error, TransferError)
    assert result.error.cause == "deadline"
    assert not result.settled
    assert pair.decode.sink.counts.num_in_flight == 0
    with pytest.raises(queue.Empty):
        pair.decode.settled.get(timeout=0.2)
    pair.source.thaw()
    assert pair.decode.settled.get(timeout=PROMPT_S) == "a"
    assert not untouched(pair.decode), "the bytes of a thawed peer land: this is what quarantine is for"
    assert pair.decode.results.empty()
    assert pair.decode.settled.empty()


def test_a_frozen_source_that_is_killed_settles(make_pair, own_source):
    pair = make_pair(transport="emulated", source=own_source())
    ticket = pair.source.grant("a", BLOCKS, SLOT)
    pair.source.freeze()
    assert not pair.decode.read(ticket, BLOCKS, SLOT, deadline_s=0.2).settled
    pair.source.kill()
    assert pair.decode.settled.get(timeout=PROMPT_S) == "a"


def test_a_peer_that_thaws_after_the_deadline_serves_again(make_pair, own_source):
    pair = make_pair(transport="emulated", source=own_source())
    ticket = pair.source.grant("a", BLOCKS, SLOT)
    pair.source.freeze()
    assert not pair.decode.read(ticket, BLOCKS, SLOT, deadline_s=0.2).settled
    pair.source.thaw()
    assert pair.decode.settled.get(timeout=PROMPT_S) == "a"
    assert pair.decode.read(ticket, BLOCKS, SLOT).error is None, "the lease was never ended"
    assert pair.source.next_ended().reason == "done"


def test_a_frozen_peer_does_not_hold_up_another(make_pair, own_source):
    pair = make_pair(transport="emulated", source=own_source())
    other = own_source()
    other.open(PoolShape(), environment={"UCX_TLS": "^cma"})
    pair.decode.connect(other, "127.0.0.1:2")
    ticket = pair.source.grant("a", BLOCKS, SLOT)
    pair.source.freeze()
    pair.decode.start(ticket, BLOCKS, SLOT)
    pair.decode.start(other.grant("b", BLOCKS, 1), [7, 8, 9], 1)
    result = pair.decode.result(PROMPT_S)
    assert (result.request_id, result.error) == ("b", None)
    assert pair.decode.sink.counts.num_in_flight == 1


def test_a_restarted_source_does_not_disturb_a_late_read_of_its_former_life(make_pair, own_source):
    """Letting NIXL forget a peer does not stop its bytes; it only hides when they have landed."""
    pair = make_pair(LARGE, transport="emulated", source=own_source())
    blocks = list(range(1, 513))
    ticket = pair.source.grant("a", blocks, SLOT)
    pair.source.freeze()
    assert not pair.decode.read(ticket, blocks, SLOT, deadline_s=0.2).settled
    second = own_source()
    second.open(LARGE, environment={"UCX_TLS": "^cma"})
    pair.decode.connect(second)  # at the same address
    with pytest.raises(queue.Empty):
        pair.decode.settled.get(timeout=0.1)
    pair.source.thaw()
    assert pair.decode.settled.get(timeout=PROMPT_S) == "a"


def test_after_closing_nothing_lands_any_more(make_pair, own_source):
    pair = make_pair(LARGE, transport="emulated", source=own_source())
    blocks = list(range(1, 513))
    ticket = pair.source.grant("a", blocks, SLOT)
    pair.source.freeze()
    assert not pair.decode.read(ticket, blocks, SLOT, deadline_s=0.2).settled
    started = time.monotonic()
    pair.decode.close()
    assert time.monotonic() - started < PROMPT_S
    pair.source.thaw()
    # UCX may abort a process that wakes up to answer a reader which has gone (in ucp_request_try_send).
    with contextlib.suppress(EOFError, ConnectionResetError):
        assert pair.source.num_leases() == 1
    assert untouched(pair.decode)


def test_connecting_to_a_frozen_source_fails_by_its_deadline(make_pair, make_decode, own_source, monkeypatch):
    monkeypatch.setattr(peer_memories, "WARM_UP_DEADLINE_S", 0.3)
    pair = make_pair(transport="emulated", source=own_source())
    newcomer = make_decode(PoolShape(), transport="emulated")
    reply = pair.source.handshake(newcomer.sink.introduction)
    pair.source.freeze()
    with pytest.raises(HandshakeError, match="no answer within"):
        newcomer.sink.add_peer("x:1", reply)
    assert not newcomer.sink.knows(reply.incarnation)
    with pytest.raises(HandshakeError, match="have not ended yet"):
        newcomer.sink.add_peer("x:1", reply)
    pair.source.thaw()
    monkeypatch.setattr(peer_memories, "WARM_UP_DEADLINE_S", 10.0)
    wait_until(lambda: _connects(newcomer, reply))
    assert newcomer.read(pair.source.grant("a", BLOCKS, SLOT), BLOCKS, SLOT).error is None


def test_a_source_killed_while_it_did_not_answer_a_connection_is_no_fault_of_ours(
    make_pair, make_decode, own_source, monkeypatch
):
    monkeypatch.setattr(peer_memories, "WARM_UP_DEADLINE_S", 0.3)
    pair = make_pair(transport="emulated", source=own_source())
    newcomer = make_decode(PoolShape(), transport="emulated")
    reply = pair.source.handshake(newcomer.sink.introduction)
    pair.source.freeze()
    with pytest.raises(HandshakeError, match="no answer within"):
        newcomer.sink.add_peer("x:1", reply)
    pair.source.kill()
    other = own_source()
    other.open(PoolShape(), environment={"UCX_TLS": "^cma"})
    newcomer.connect(other)
    assert newcomer.read(other.grant("a", BLOCKS, SLOT), BLOCKS, SLOT).error is None


def test_a_notification_that_can_t_be_read_changes_nothing(make_pair):
    pair = make_pair()
    ticket = pair.source.grant("a", BLOCKS, SLOT)
    stranger = TransferAgent("stranger", [torch.zeros(1)])
    peer = stranger.add_peer(pair.source.handshake(pair.decode.sink.introduction).ranks[0].agent_metadata)
    for message in (b"", b"\xff" * 100, b"\x93\x01\xa4Done\x92\xc0\xc0", os.urandom(10_000)):
        stranger.notify(peer, message)
    stranger.poll()
    assert pair.decode.read(ticket, BLOCKS, SLOT).error is None
    assert pair.source.next_ended().reason == "done"
    stranger.close()


def test_a_fault_in_a_callback_of_the_sink_is_reported(make_pair):
    pair = make_pair()
    pair.decode.callback_is_broken = True
    pair.decode.start(pair.source.grant("a", BLOCKS, SLOT), BLOCKS, SLOT)
    assert isinstance(pair.decode.faults.get(timeout=PROMPT_S), ZeroDivisionError)


def test_a_fault_in_a_callback_of_the_source_is_reported(make_pair):
    pair = make_pair()
    pair.source.break_lease_callback()
    pair.source.end(pair.source.grant("a", BLOCKS, SLOT))
    assert "ZeroDivisionError" in pair.source.fatal()


def test_a_killed_and_a_closed_pair_leave_nothing_behind(make_pair, make_decode, own_source):
    def leftovers():
        return {name for name in os.listdir("/dev/shm") if name.startswith("ucx")}

    before, threads_before = leftovers(), threading.active_count()
    pair = make_pair(transport="emulated", source=own_source())
    idle_threads = pair.source.num_threads()
    assert pair.decode.read(pair.source.grant("a", BLOCKS, SLOT), BLOCKS, SLOT).error is None
    pair.source.close_source()
    assert pair.source.num_threads() == idle_threads - 1
    pair.source.kill()
    pair.decode.close()
    wait_until(lambda: threading.active_count() <= threads_before)
    assert leftovers() <= before


def test_a_layout_s_sizes_are_checked_before_anything_is_connected(make_pair):
    pair = make_pair()
    reply = pair.source.handshake(pair.decode.sink.introduction)
    region = reply.ranks[0].kv_region
    short = with_rank(reply, kv_region=dataclasses.replace(region, num_bytes=region.num_bytes - 1))
    with pytest.raises(HandshakeError, match="its layout describes"):
        pair.decode.sink.add_peer("x:1", with_digest(dataclasses.replace(short, incarnation="b")))


def _connects(decode, reply):
    try:
        decode.sink.add_peer("x:1", reply)
    except HandshakeError:
        return False
    return True
