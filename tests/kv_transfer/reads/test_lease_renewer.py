"""Leases of waiting requests live as long as their reader lives."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import secrets
import socket
import time
from types import SimpleNamespace

import grpc.aio
import pytest

from kv_transfer.handshake import introduce
from kv_transfer.leases import source
from kv_transfer.leases.source import TransferSource, transfer_handlers
from kv_transfer.nixl.transfer_thread import TransferThread
from kv_transfer.reads.failure_counts import FailureCounts
from kv_transfer.reads.lease_renewer import RENEWALS_PER_LIFETIME, LeaseRenewer
from kv_transfer.reads.peers import Peers
from testing.kv_transfer.pools import PoolShape
from wire.messages.handoff import EndLease
from wire.rpc import TRANSFER_SERVICE, service

TTL_S = 0.4
TIMEOUT_S = 60.0
NOBODY = "127.0.0.1:1"
BLOCKS, SLOT = [3, 4, 5], 2


class CountingPeers(Peers):
    """Notes how many leases each call renews."""

    def __init__(self, sink):
        super().__init__(sink, FailureCounts(), timeout_s=1.0)
        self.calls: list[tuple[str, int]] = []

    async def renew(self, address, leases, *, timeout_s):
        self.calls.append((address, len(leases.leases)))
        return await super().renew(address, leases, timeout_s=timeout_s)


class FairClock:
    """Clock of the leases. It stops while this event loop stands still, because the renewer can't run
    then."""

    TICK_S = 0.005

    def __init__(self):
        self._now_s = time.monotonic()

    def __call__(self):
        return self._now_s

    async def run(self):
        before_s = time.monotonic()
        while True:
            await asyncio.sleep(self.TICK_S)
            now_s = time.monotonic()
            self._now_s += min(now_s - before_s, 4 * self.TICK_S)
            before_s = now_s


class World:
    """A server whose memory is leased, and the keeper of one that waits to read it."""

    def __init__(self, sink, clock):
        self.clock = clock
        self.ended: queue.SimpleQueue = queue.SimpleQueue()
        self.serving: queue.SimpleQueue = queue.SimpleQueue()
        self.faults: list[BaseException] = []
        self.peers = CountingPeers(sink)
        self.keeper = LeaseRenewer(self.peers)
        self.server = grpc.aio.server()
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        caches = PoolShape().caches()
        name = f"source-{secrets.token_hex(4)}"
        self.thread = TransferThread(caches, name, self.faults.append)
        self.source = TransferSource(
            self.thread,
            introduce(caches, name, "fp"),
            SimpleNamespace(lease_ended=self.ended.put, serving=self.serving.put),
            address=self.address,
            lease_ttl_s=TTL_S,
            max_leases=16,
        )
        self.thread.start(self.source)

    async def __aenter__(self):
        handlers = service(TRANSFER_SERVICE, transfer_handlers(self.source))
        self.server.add_generic_rpc_handlers((handlers,))
        await self.server.start()
        self._ticking = asyncio.create_task(self.clock.run())
        return self

    async def lifetimes(self, count):
        end_s = self.clock() + count * TTL_S
        while self.clock() < end_s:
            await asyncio.sleep(FairClock.TICK_S)

    async def __aexit__(self, *_error):
        self._ticking.cancel()
        await self.keeper.close()
        await self.peers.close()
        await self.server.stop(None)
        await asyncio.to_thread(self.thread.close)
        assert not self.faults

    def grant(self, name):
        return self.source.grant(name, num_tokens=24, block_ids=BLOCKS, state_slot=SLOT)

    async def next_ended(self):
        return await asyncio.to_thread(self.ended.get, True, TIMEOUT_S)


@pytest.fixture
async def world(sink, monkeypatch):
    clock = FairClock()
    monkeypatch.setattr(source, "time", SimpleNamespace(monotonic=clock))
    async with World(sink, clock) as world:
        yield world


@contextlib.asynccontextmanager
async def server_that_says_nothing():
    """Takes connections, as a frozen process does, and never answers."""

    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def test_a_held_lease_outlives_its_time_to_live_and_ends_soon_after_it_is_let_go(world):
    held, forgotten = world.grant("held"), world.grant("forgotten")
    world.keeper.hold(held)
    assert (await world.next_ended()).request_id == "forgotten"
    await world.lifetimes(3)
    assert (world.source.num_leases, world.ended.empty()) == (1, True)
    world.keeper.let_go(held)
    let_go_s = world.clock()
    ended = await world.next_ended()
    assert (ended.request_id, ended.reason) == ("held", "expired")
    assert world.clock() - let_go_s < 3 * TTL_S
    assert forgotten.lease_id != held.lease_id


async def test_a_kept_state_makes_its_server_poll_once_a_reader_is_announced(world):
    ticket = world.source.keep("kept", num_tokens=24, block_ids=BLOCKS, state_slot=SLOT)
    assert (world.source.num_leases, world.serving.empty()) == (1, True)
    world.keeper.announce(ticket)
    assert await asyncio.to_thread(world.serving.get, True, TIMEOUT_S)
    assert set(world.peers.calls) == {(world.address, 1)}
    world.keeper.let_go(ticket)
    assert (await world.next_ended()).reason == "expired"
    assert not await asyncio.to_thread(world.serving.get, True, TIMEOUT_S)


async def test_all_leases_of_a_server_are_renewed_in_one_call(world):
    tickets = [world.grant(str(i)) for i in range(8)]
    for ticket in tickets:
        world.keeper.hold(ticket)
    began_s = time.monotonic()
    await world.lifetimes(3)
    lifetimes = (time.monotonic() - began_s) / TTL_S
    assert world.source.num_leases == 8
    assert {count for _, count in world.peers.calls} == {8}
    assert len(world.peers.calls) <= lifetimes * RENEWALS_PER_LIFETIME


async def test_leases_taken_one_after_another_come_to_be_renewed_together(world):
    for i in range(8):
        world.keeper.hold(world.grant(str(i)))
        await world.lifetimes(0.125 / RENEWALS_PER_LIFETIME)
    await world.lifetimes(1)
    world.peers.calls.clear()
    began_s = time.monotonic()
    await world.lifetimes(3)
    lifetimes = (time.monotonic() - began_s) / TTL_S
    assert world.source.num_leases == 8
    assert len(world.peers.calls) <= lifetimes * 2 * RENEWALS_PER_LIFETIME


async def test_one_that_joins_others_is_renewed_in_time(world):
    world.keeper.hold(world.grant("first"))
    await world.lifetimes(0.25)
    world.keeper.hold(world.grant("second"))
    await world.lifetimes(3)
    assert world.source.num_leases == 2


async def test_nothing_is_asked_for_when_nothing_waits(world):
    ticket = world.grant("a")
    world.keeper.hold(ticket)
    world.keeper.let_go(ticket)
    world.keeper.let_go(ticket)
    assert len(world.keeper) == 0
    assert (await world.next_ended()).reason == "expired"
    assert world.peers.calls == []


async def test_a_server_that_is_gone_does_not_cost_another_its_leases(world):
    world.keeper.hold(dataclasses.replace(world.grant("lost"), address=NOBODY))
    world.keeper.hold(world.grant("kept"))
    assert (await world.next_ended()).request_id == "lost"
    await world.lifetimes(3)
    assert world.source.num_leases == 1


async def test_a_frozen_server_whose_leases_live_long_does_not_cost_another_its_short_ones(world):
    async with server_that_says_nothing() as frozen:
        lost = dataclasses.replace(world.grant("lost"), address=frozen, ttl_s=300 * TTL_S)
        world.keeper.hold(lost)
        held = world.keeper._held
        next(iter(held.values())).due = 0.0  # it is asked first
        world.keeper.hold(world.grant("kept"))
        assert (await world.next_ended()).request_id == "lost"
        await world.lifetimes(3)
        assert world.source.num_leases == 1
        assert sum(address == frozen for address, _ in world.peers.calls) == 1
        await world.keeper.close()


async def test_a_lease_that_has_ended_is_not_asked_for_again(world, caplog):
    ended, held = world.grant("ended"), world.grant("held")
    for ticket in (ended, held):
        world.keeper.hold(ticket)
    world.source.end(EndLease(ended.request_id, ended.lease_id, ended.epoch))
    assert (await world.next_ended()).request_id == "ended"
    async with asyncio.timeout(TIMEOUT_S):
        while len(world.keeper) == 2:
            await asyncio.sleep(0.01)
    num_calls = len(world.peers.calls)
    await world.lifetimes(3)
    later = [count for _, count in world.peers.calls[num_calls:]]
    assert later
    assert set(later) == {1}, "one is asked for, the other is not"
    assert caplog.text.count("had ended before") == 1
    assert (len(world.keeper), world.source.num_leases) == (1, 1)
    world.keeper.let_go(ended)


async def test_closing_lets_go_of_all_at_once(world):
    async with server_that_says_nothing() as frozen:
        world.keeper.hold(dataclasses.replace(world.grant("a"), address=frozen))
        async with asyncio.timeout(TIMEOUT_S):
            while not world.peers.calls:  # then one is under way
                await asyncio.sleep(0.01)
        await asyncio.wait_for(world.keeper.close(), TIMEOUT_S / 6)
    assert len(world.keeper) == 0
