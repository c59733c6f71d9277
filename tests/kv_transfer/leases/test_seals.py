"""Tickets and progress messages get digests of the memory that they name, in order and on other threads."""

from __future__ import annotations

import queue
import threading

import pytest

import kv_transfer.digester
from kv_transfer.digester import Digester
from kv_transfer.leases.seals import DigestSeals, make_seals
from testing.kv_transfer.pools import BLOCK_SIZE, PoolShape, fill
from wire.messages.handoff import PartialTicket, Ticket, UnitDigests

DEADLINE_S = 30.0
EARLY = PartialTicket("r", 3, 7, "a:1", "aa", 5 * BLOCK_SIZE - 3, 1.0)
BLOCKS, SLOT = (4, 2, 9, 1, 5), 6
TICKET = Ticket("r", 3, 7, "a:1", "aa", 5 * BLOCK_SIZE - 3, BLOCKS, SLOT, 1.0)


@pytest.fixture
def digester():
    caches = PoolShape().caches()
    fill(caches, 1)
    faults: queue.Queue[BaseException] = queue.Queue()
    made = Digester(caches, faults.put)
    yield made
    made.close()
    assert faults.empty()


class Loop:
    """Stands for the event loop: keeps what is posted to it."""

    def __init__(self):
        self.posted = queue.Queue()

    def answer(self, callback, *arguments):
        self.posted.put((callback, arguments))

    def run_one(self):
        callback, arguments = self.posted.get(timeout=DEADLINE_S)
        callback(*arguments)


def whole(digester):
    return UnitDigests(digester.blocks(BLOCKS, BLOCK_SIZE - 3), digester.state(SLOT))


def test_a_short_ticket_is_sealed_on_the_event_loop(digester):
    loop, sealed = Loop(), []
    DigestSeals(digester, loop.answer, only_quick=True).seal(TICKET, sealed.append)
    assert not sealed
    loop.run_one()
    assert [one.unit_digests for one in sealed] == [whole(digester)]


@pytest.mark.parametrize("only_quick", [True, False])
def test_a_long_ticket_is_sealed_on_the_digesting_thread_or_not_at_all(digester, monkeypatch, only_quick):
    monkeypatch.setattr(kv_transfer.digester, "QUICK_BYTES", 100)
    loop, sealed = Loop(), []
    DigestSeals(digester, loop.answer, only_quick=only_quick).seal(TICKET, sealed.append)
    loop.run_one()
    assert [one.unit_digests for one in sealed] == [None if only_quick else whole(digester)]


def test_blocks_told_before_are_digested_once_and_come_before_the_ticket(digester, monkeypatch):
    rest = digester.num_bytes(2, 1)
    monkeypatch.setattr(kv_transfer.digester, "QUICK_BYTES", rest)  # what was told before does not count
    digested = []
    sound = digester.blocks
    monkeypatch.setattr(
        digester,
        "blocks",
        lambda ids, last=0: digested.append((list(ids), threading.get_ident())) or sound(ids, last),
    )
    loop, told = Loop(), []
    seals = DigestSeals(digester, loop.answer, only_quick=True)
    seals.progress(EARLY, BLOCKS[:2], lambda *news: told.append(news))
    seals.progress(EARLY, BLOCKS[2:3], lambda *news: told.append(news))
    seals.seal(TICKET, told.append)
    for _ in range(3):
        loop.run_one()
    expected = UnitDigests(sound(BLOCKS, BLOCK_SIZE - 3), digester.state(SLOT))
    assert told[:2] == [([4, 2], expected.blocks[:2]), ([9], expected.blocks[2:3])]
    assert told[2].unit_digests == expected
    assert [ids for ids, _ in digested] == [[4, 2], [9], [1, 5]]
    assert threading.get_ident() not in {thread for _, thread in digested}
    assert seals._digests == {}
    assert not seals._followed


def test_a_prompt_that_was_given_up_is_forgotten(digester):
    loop = Loop()
    seals = DigestSeals(digester, loop.answer, only_quick=False)
    seals.progress(EARLY, BLOCKS[:2], lambda *_news: None)
    seals.drop(EARLY)
    forgotten = threading.Event()
    digester.post(forgotten.set)
    assert forgotten.wait(DEADLINE_S)
    assert seals._digests == {}
    assert not seals._followed


def test_without_digests_all_is_passed_on():
    loop, told = Loop(), []
    seals = make_seals(None, loop.answer, only_quick=True)
    seals.progress(EARLY, BLOCKS[:2], lambda *news: told.append(news))
    seals.seal(TICKET, told.append)
    loop.run_one()
    loop.run_one()
    assert told == [(BLOCKS[:2], ()), TICKET]
