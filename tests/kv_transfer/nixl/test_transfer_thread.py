"""A server that lends and reads has one agent and one thread for both, and registers its pools once."""

from __future__ import annotations

import queue
import secrets

import pytest
import torch

import kv_transfer.nixl.agent
from kv_transfer.handshake import introduce
from kv_transfer.leases.source import SourceListener, TransferSource
from kv_transfer.nixl.transfer_thread import TransferThread
from kv_transfer.reads.sink import TransferSink
from kv_transfer.reads.transfer import TransferListener
from testing.kv_transfer.pools import PoolShape, fill, poison, spec_with, unit_bytes_of

TIMEOUT_S = 20.0


class Server(TransferListener, SourceListener):
    """Both sides of one server."""

    def __init__(self, shape):
        self.caches = shape.caches()
        self.results, self.ended, self.faults = queue.Queue(), queue.Queue(), queue.Queue()
        self.address = f"{secrets.token_hex(4)}:1"
        introduction = introduce(self.caches, f"server-{secrets.token_hex(4)}", "fp")
        self.thread = TransferThread(self.caches, introduction.incarnation, self.faults.put)
        self.sink = TransferSink(self.thread, introduction, self)
        self.source = TransferSource(
            self.thread, introduction, self, address=self.address, lease_ttl_s=600.0, max_leases=4
        )
        self.thread.start(self.source, self.sink)

    def transferred(self, result):
        self.results.put(result)

    def lease_ended(self, lease):
        self.ended.put(lease)

    def meet(self, other):
        self.sink.add_peer(other.address, other.source.handshake(self.sink.introduction))

    def grant(self, block_ids, slot):
        return self.source.grant("a", num_tokens=24, block_ids=block_ids, state_slot=slot)

    def read(self, ticket, block_ids, slot):
        self.sink.read(ticket, block_ids=block_ids, state_slot=slot, deadline_s=TIMEOUT_S)

    def close(self):
        self.thread.close()
        assert self.faults.empty(), self.faults.get()


@pytest.fixture
def make_server():
    made = []

    def make(shape=None):
        made.append(Server(shape or PoolShape()))
        return made[-1]

    yield make
    for server in made:
        server.close()


def units(server, block_ids, slot):
    caches = server.caches
    return torch.cat([unit_bytes_of(caches.kv)[block_ids].flatten(), unit_bytes_of(caches.state)[slot]])


def test_the_pools_of_both_sides_are_registered_once(monkeypatch, make_server):
    registered = []

    class CountingAgent(kv_transfer.nixl.agent.nixl_agent):
        def register_memory(self, tensors, *args):
            registered.extend(tensor.data_ptr() for tensor in tensors)
            return super().register_memory(tensors, *args)

    monkeypatch.setattr(kv_transfer.nixl.agent, "nixl_agent", CountingAgent)
    caches = make_server().caches
    assert registered.count(caches.kv.data_ptr()) == registered.count(caches.state.data_ptr()) == 1
    assert len(registered) == 4, "both pools, the leases' epochs, and the cells that epochs are read into"


def test_two_servers_read_from_each_other_at_once(make_server):
    servers = make_server(), make_server()
    for seed, server in enumerate(servers):
        fill(server.caches, seed)
    lent = [units(server, [4, 5, 9], 3) for server in servers]
    for one, other in (servers, servers[::-1]):
        one.meet(other)
    tickets = [server.grant([4, 5, 9], 3) for server in servers]
    for server, ticket in zip(servers, reversed(tickets), strict=True):
        server.read(ticket, [1, 2, 3], 1)
    for server, theirs in zip(servers, reversed(lent), strict=True):
        assert server.results.get(timeout=TIMEOUT_S).error is None
        assert server.ended.get(timeout=TIMEOUT_S).reason == "done"
        assert torch.equal(units(server, [1, 2, 3], 1), theirs)


def test_a_server_reads_a_ticket_of_its_own(make_server):
    """A drain that was taken back: a moved request comes back to the server that keeps its state."""
    server = make_server()
    fill(server.caches, 5)
    lent = units(server, [4, 5, 9], 3)
    server.meet(server)
    server.read(server.grant([4, 5, 9], 3), [1, 2, 3], 1)
    assert server.results.get(timeout=TIMEOUT_S).error is None
    assert server.ended.get(timeout=TIMEOUT_S).reason == "done"
    assert torch.equal(units(server, [1, 2, 3], 1), lent)


@pytest.mark.parametrize(
    "shape",
    [
        PoolShape(),
        PoolShape(spec_with(mamba_layers=0), num_slots=1),
        PoolShape(spec_with(attn_layers=0, kv_heads=0, head_dim=0), num_blocks=1),
    ],
    ids=["both", "no recurrent layers", "no attention layers"],
)
def test_the_first_contact_reads_a_whole_block_and_slot_from_pool_to_pool(make_server, shape):
    """On a GPU only this opens the peer's memory; a read of epochs, in host memory, does not."""
    reader, lender = make_server(shape), make_server(shape)
    poison(reader.caches)
    fill(lender.caches, 2)
    before = [unit_bytes_of(pool).clone() for pool in (reader.caches.kv, reader.caches.state)]
    reader.meet(lender)
    for pool, theirs, untouched in zip(
        (reader.caches.kv, reader.caches.state),
        (lender.caches.kv, lender.caches.state),
        before,
        strict=True,
    ):
        assert torch.equal(unit_bytes_of(pool)[0], unit_bytes_of(theirs)[0])
        assert torch.equal(unit_bytes_of(pool)[1:], untouched[1:])
