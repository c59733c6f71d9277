"""What a server leases and reads is reported to its engine by the request ids that the engine knows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import kv_transfer.exchange
import kv_transfer.reads.peers
from engine.request import Request
from engine.schedule.capacity import CapacityPlan
from kv_transfer.engine_server import EngineServerConfig
from kv_transfer.exchange import ExchangeListener, StateExchange
from kv_transfer.leases.source import EndedLease
from kv_transfer.reads.transfer import TransferCounts, TransferResult
from telemetry.engine_metrics import Measures
from testing.kv_transfer.pools import PoolShape
from testing.router.scripted_servers import server_stats
from wire.errors import DeadlineError, HandshakeError, TransferError, UnavailableError
from wire.messages.handoff import EndLease, Ticket


class ScriptedSink:
    """Reads that end when the test says so."""

    def __init__(self, _thread, introduction, listener, _ranks, _digester):
        self.introduction, self.listener = introduction, listener
        self.counts = TransferCounts()
        self.reads = []
        self.take_report = None

    def read(self, ticket, **fields):
        self.reads.append((ticket, fields))


class ScriptedSource:
    """Leases that end when they are told to."""

    num_leases = 0

    def __init__(self, _thread, _introduction, listener, **_settings):
        self.listener = listener
        self.ended, self.revoked = [], []

    def grant(self, request_id, *, num_tokens, block_ids, state_slot, digests):
        return ticket_of(request_id, num_tokens=num_tokens, block_ids=tuple(block_ids), state_slot=state_slot)

    def end(self, message):
        self.ended.append(message)
        self.listener.lease_ended(EndedLease(message.request_id, message.lease_id, message.epoch, "ended"))

    def revoke(self, ticket):
        self.revoked.append(ticket.request_id)


class ScriptedEngine:
    """Records its calls. Events posted to it run at once."""

    def __init__(self):
        self.caches = PoolShape().caches()
        self.fingerprint = "fp"
        self.capacity = CapacityPlan(20, 9, 16, 1, 1, 64)
        self.config = SimpleNamespace(block_size=16)
        self.released = []
        self.finds_damage = False
        self.measures = Measures()

    def transferred(self, request, *, error, settled):
        if self.finds_damage:
            return [f"{request.request_id}: damaged"]
        return [] if error is None else [f"{request.request_id}: {error.message}"]

    def stats(self):
        return server_stats(num_steps=4)

    def release(self, request_id):
        self.released.append(request_id)

    def digests(self, _request):
        return None


def ticket_of(request_id, *, num_tokens=40, block_ids=(7, 8, 9), state_slot=3):
    return Ticket(
        request_id=request_id,
        lease_id=5,
        epoch=2,
        address="127.0.0.1:1",
        incarnation="aa",
        num_tokens=num_tokens,
        block_ids=block_ids,
        state_slot=state_slot,
        ttl_s=60.0,
        digests=None,
    )


class World(ExchangeListener):
    """An exchange, what it was made with, and what it said."""

    def __init__(self):
        self.engine = ScriptedEngine()
        self.said = []
        host = SimpleNamespace(
            engine=self.engine,
            ranks=None,
            post=lambda event: event(),
            answer=lambda callback, *args: callback(*args),
        )
        server = SimpleNamespace(port=2, fail=None, identity=None, add_service=lambda name, handlers: None)
        self.exchange = StateExchange(
            host,
            server,
            self,
            EngineServerConfig(
                SimpleNamespace(role="decode"),
                "127.0.0.1",
                2,
                "a",
                transfer_deadline_s=1.0,
                verify_handoffs="off",
            ),
            incarnation="bb",
            lease_ttl_s=60.0,
        )
        self.sink, self.source = self.exchange._sink, self.exchange._source

    def read_ended(self, request, _result, outputs):
        self.said.append((request.request_id, outputs))


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(kv_transfer.exchange, "TransferSink", ScriptedSink)
    monkeypatch.setattr(kv_transfer.exchange, "TransferSource", ScriptedSource)
    monkeypatch.setattr(
        kv_transfer.exchange, "TransferThread", lambda *_: SimpleNamespace(start=lambda *_: None)
    )
    return World()


def request_that_reads(ticket):
    request = Request("turn-2", list(range(60)), params=None, ticket=ticket)
    request.memory.block_ids, request.memory.slots, request.memory.state_index = [1, 2, 3, 4], [6], 0
    return request


def test_a_kept_state_is_read_under_the_name_of_the_request_that_reads_it(world):
    """Its ticket has the previous turn's request id. Memory that settled late was once never freed under that
    id."""
    world.exchange.read(request_that_reads(ticket_of("turn-1")))
    ((ticket, fields),) = world.sink.reads
    assert (ticket.lease_id, ticket.epoch, fields["block_ids"]) == (5, 2, [1, 2, 3])
    late = TransferResult(ticket.request_id, 0, 0, 1.0, TransferError("too late"), settled=False)
    world.sink.listener.transferred(late)
    assert world.said == [("turn-2", ["turn-2: too late"])]
    world.sink.listener.settled(ticket.request_id)
    assert world.engine.released == ["turn-2"]


def test_blocks_that_the_prefix_cache_had_are_not_read(world):
    request = request_that_reads(ticket_of("turn-1"))
    request.memory.nodes = [object(), object()]
    world.exchange.read(request)
    ((_, fields),) = world.sink.reads
    assert (fields["first_block"], fields["block_ids"]) == (2, [3])


def test_a_request_is_told_how_much_was_read(world):
    request = request_that_reads(ticket_of("turn-1"))
    world.exchange.read(request)
    world.sink.listener.transferred(TransferResult("turn-2", 4096, 3, 0.25, None, settled=True))
    measured = request.measured
    assert (measured.transfer_bytes, measured.transfer_descriptors, measured.transfer_s) == (4096, 3, 0.25)
    assert world.said == [("turn-2", [])]


def test_a_lease_covers_computed_tokens_and_ends_once(world):
    request = request_that_reads(None)
    request.num_computed = 33
    tickets = []
    world.exchange.lease(request, tickets.append)
    assert [one.block_ids for one in tickets] == [(1, 2, 3)]
    assert world.exchange.end_lease("turn-2")
    assert world.source.ended == [EndLease("turn-2", 5, 2)]
    assert world.engine.released == ["turn-2"]
    assert not world.exchange.end_lease("turn-2")


def test_memory_that_is_given_back_is_revoked_once(world):
    request = request_that_reads(None)
    request.num_computed = 33
    assert request.lender is None
    world.exchange.lease(request, lambda ticket: None)
    for _ in range(2):
        request.lender.revoke(request)
    assert world.source.revoked == ["turn-2"]


def test_what_did_not_come_is_counted_by_cause(world):
    def end(error, *, finds_damage=False):
        world.engine.finds_damage = finds_damage
        world.exchange.read(request_that_reads(ticket_of("turn-1")))
        world.sink.listener.transferred(TransferResult("turn-2", 4096, 3, 0.25, error, settled=True))

    end(None)
    end(TransferError("too late", cause="deadline"))
    end(TransferError("the lease ended", cause="lease_ended"))
    end(TransferError("the read failed"))
    end(None, finds_damage=True)
    stats = world.exchange.stats()
    assert stats.num_steps == 4
    assert stats.transfer_failures == {
        "deadline": 1,
        "peer_gone": 1,
        "lease_ended": 1,
        "handshake_refused": 0,
        "metadata": 0,
        "ticket_refused": 0,
        "digest": 1,
    }


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (HandshakeError("another model"), "handshake_refused"),
        (UnavailableError("connection refused"), "peer_gone"),
        (DeadlineError("no answer"), "deadline"),
    ],
    ids=lambda value: getattr(value, "code", value),
)
async def test_a_handshake_that_fails_for_a_ticket_is_counted(world, monkeypatch, error, cause):
    async def refuse(*_arguments, **_settings):
        raise error

    monkeypatch.setattr(kv_transfer.reads.peers, "call", refuse)
    world.sink.knows = lambda _incarnation: False
    with pytest.raises((type(error), TransferError)):  # a deadline of the handshake is none of the request's
        await world.exchange.peers.ensure(ticket_of("turn-1"))
    failures = world.exchange.stats().transfer_failures
    assert {name for name, count in failures.items() if count} == {cause}


def test_ended_leases_are_counted_by_reason(world):
    for number, reason in enumerate(("done", "expired", "expired")):
        world.source.listener.lease_ended(EndedLease(f"r{number}", number, 0, reason))
    assert world.exchange.stats().leases_ended == {"done": 1, "ended": 0, "expired": 2}
