"""A lease is ended early while its memory is read: the data is whole, or the reader knows that it is not."""

from __future__ import annotations

import queue
import random
import secrets
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

import kv_transfer.reads.epoch_check
from kv_transfer.handshake import introduce
from kv_transfer.leases.source import TransferSource
from kv_transfer.nixl.transfer_thread import TransferThread
from kv_transfer.reads.sink import TransferSink
from testing.kv_transfer.pools import PoolShape, unit_bytes_of
from wire.messages.handoff import EndLease

NUM_INTERLEAVINGS = 10_000
SHAPE = PoolShape(num_blocks=65, num_slots=9)
NUM_AT_ONCE = 8
BLOCKS_OF_EACH = 8
READ_WITHIN_S = 0.5e-3
FIRST_END_WITHIN_S = 3e-3
"""Of a round's start. Its reads take about as long together, so leases end before, during and after them."""
PACE = 1.05
"""By this factor it is corrected after each round: how long reads take is up to the machine and its load."""
NEXT = 255
"""What the next owner of leased memory writes."""
TIMEOUT_S = 30.0


@dataclass
class Tally:
    """Results of reads whose leases ended at random moments."""

    num_whole: int = 0
    num_refused: int = 0
    num_torn: int = 0
    """Refused ones that hold bytes of both the ticket's request and the memory's next owner."""
    num_wrong: int = 0
    """Reads reported as good whose bytes are not the ticket's."""


class Race:
    """A source that reuses memory as soon as its lease is over, and a sink that reads it, in one process.

    The two sides' threads are the servers' own; reads go through UCX between their agents.
    """

    def __init__(self) -> None:
        self.ours, self.theirs = SHAPE.caches(), SHAPE.caches()
        self._results: queue.SimpleQueue = queue.SimpleQueue()
        self._ended: queue.SimpleQueue = queue.SimpleQueue()
        self._end_within_s = FIRST_END_WITHIN_S
        faults: list[BaseException] = []
        self.faults = faults
        listener = SimpleNamespace(
            transferred=self._results.put,
            settled=lambda _: None,
            lease_ended=self._reuse,
            serving=lambda _: None,
        )
        lends, reads = (
            introduce(self.ours, f"{name}-{secrets.token_hex(4)}", "fp") for name in ("source", "sink")
        )
        self._threads = [
            TransferThread(caches, who.incarnation, faults.append)
            for caches, who in ((self.theirs, lends), (self.ours, reads))
        ]
        self.source = TransferSource(
            self._threads[0],
            lends,
            listener,
            address="127.0.0.1:1",
            lease_ttl_s=600.0,
            max_leases=NUM_AT_ONCE,
        )
        self.sink = TransferSink(self._threads[1], reads, listener)
        for thread, user in zip(self._threads, (self.source, self.sink), strict=True):
            thread.start(user)
        self.sink.add_peer("127.0.0.1:1", self.source.handshake(self.sink.introduction))
        self._pools = [(unit_bytes_of(a.kv), unit_bytes_of(a.state)) for a in (self.ours, self.theirs)]

    def close(self) -> None:
        for thread in reversed(self._threads):
            thread.close()
        assert not self.faults, self.faults

    def run(self, count: int, choose: random.Random) -> Tally:
        """Reads ``count`` leases, each ended at a random moment between its grant and well after its read."""
        tally = Tally()
        for first in range(0, count, NUM_AT_ONCE):
            serials = range(first, min(first + NUM_AT_ONCE, count))
            num_whole = tally.num_whole
            self._round(serials, choose, tally)
            most_were_whole = 2 * (tally.num_whole - num_whole) > len(serials)
            self._end_within_s *= 1 / PACE if most_were_whole else PACE
        return tally

    def _round(self, serials: range, choose: random.Random, tally: Tally) -> None:
        for serial in serials:
            self._write(self._pools[1], serial, serial % 250 + 1)
        tickets = {
            serial: self.source.grant(
                str(serial),
                num_tokens=BLOCKS_OF_EACH * SHAPE.block_size,
                block_ids=blocks_of(serial),
                state_slot=slot_of(serial),
            )
            for serial in serials
        }
        moves = [(choose.uniform(0.0, READ_WITHIN_S), i, self._read) for i in serials]
        moves += [(choose.uniform(0.0, self._end_within_s), i, self._end) for i in serials]
        started = time.perf_counter()
        for at_s, serial, move in sorted(moves, key=lambda move: move[0]):
            time.sleep(max(0.0, started + at_s - time.perf_counter()))  # lets the other threads run
            move(tickets[serial])
        for _ in serials:
            result = self._results.get(timeout=TIMEOUT_S)
            serial = int(result.request_id)
            if result.error is not None:
                tally.num_refused += 1
                tally.num_torn += self._holds_some(serial, serial % 250 + 1) and self._holds_some(
                    serial, NEXT
                )
            elif self._holds(serial, serial % 250 + 1):
                tally.num_whole += 1
            else:
                tally.num_wrong += 1
        for _ in serials:
            self._ended.get(timeout=TIMEOUT_S)

    def _read(self, ticket) -> None:
        serial = int(ticket.request_id)
        self.sink.read(
            ticket,
            block_ids=blocks_of(serial),
            state_slot=slot_of(serial),
            deadline_s=TIMEOUT_S,
        )

    def _end(self, ticket) -> None:
        self.source.end(EndLease(ticket.request_id, ticket.lease_id, ticket.epoch))

    def _reuse(self, lease) -> None:
        """The next owner writes at once: no byte of the old one is left in its place."""
        self._write(self._pools[1], int(lease.request_id), NEXT)
        self._ended.put(lease)

    @staticmethod
    def _write(pools, serial: int, byte: int) -> None:
        kv, state = pools
        kv[blocks_of(serial)[0] : blocks_of(serial)[-1] + 1].fill_(byte)
        state[slot_of(serial)].fill_(byte)

    def _holds(self, serial: int, byte: int) -> bool:
        return all(bool(np.all(part == byte)) for part in self._landed(serial))

    def _holds_some(self, serial: int, byte: int) -> bool:
        return any(bool(np.any(part == byte)) for part in self._landed(serial))

    def _landed(self, serial: int) -> list[np.ndarray]:
        kv, state = (pool.numpy() for pool in self._pools[0])
        return [kv[blocks_of(serial)[0] : blocks_of(serial)[-1] + 1], state[slot_of(serial)]]


def blocks_of(serial: int) -> list[int]:
    first = 1 + serial % NUM_AT_ONCE * BLOCKS_OF_EACH
    return list(range(first, first + BLOCKS_OF_EACH))


def slot_of(serial: int) -> int:
    return 1 + serial % NUM_AT_ONCE


@pytest.fixture
def race():
    race = Race()
    yield race
    race.close()


def test_10_000_leases_ended_while_they_are_read(race):
    tally = race.run(NUM_INTERLEAVINGS, random.Random(11))
    assert tally.num_wrong == 0
    assert tally.num_whole + tally.num_refused == NUM_INTERLEAVINGS
    assert min(tally.num_whole, tally.num_refused) > NUM_INTERLEAVINGS // 50, "leases end at one moment only"
    assert tally.num_torn > 0, "no lease ended in the midst of its read"


def test_without_the_epoch_s_check_wrong_bytes_come_through(race, monkeypatch):
    """Shows that the test above would notice if the cell were not read after the data."""

    monkeypatch.setattr(kv_transfer.reads.epoch_check, "_moved", lambda *_: None)
    assert race.run(NUM_INTERLEAVINGS // 20, random.Random(12)).num_wrong > 0
