"""What a neighbour answers is checked before anything is read, and one that is no use is left alone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from engine.files.start_files import FileJob, StartForm
from engine.memory.cached_start import Place
from kv_transfer.starts import neighbour_store
from kv_transfer.starts.neighbour_store import FIRST_ASK_S, MAX_PAUSED, NeighbourStore
from kv_transfer.starts.start_reader import NUM_BUFFERS, StartReader, _place_of
from wire.errors import DeadlineError, HandshakeError, UnavailableError
from wire.messages.handoff import Region
from wire.messages.neighbours import BorrowReply, LentStart

FORM = StartForm("f", "layout", page_bytes=64, state_bytes=100)
ADDRESS = "10.0.0.2:8100"
JOB = FileJob((b"k" * 16,) * 2, b"", 2, (1, 2), (3, 4), address=ADDRESS)
MEMORY = np.zeros((8, 64), dtype=np.uint8)


def lent(block_pages=(5, 6), state_pages=(7, 8), address=4096, memory="DRAM", place=0):
    region = Region(address, 8 * 64, 0, memory)
    return LentStart("bb", 1, 1, 10.0, region, block_pages, state_pages, place)


class ScriptedPeers:
    """A neighbour that answers what the test says."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    async def borrow(self, address, ask, *, timeout_s):
        self.asked.append((address, ask))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def reach(self, address, incarnation):
        raise HandshakeError("it serves another model")


async def failure_of(answer):
    """Asks a neighbour that answers this; returns the kind of failure."""
    store, woken = NeighbourStore(), asyncio.Event()
    store.open(FORM)
    sink = SimpleNamespace(introduction=SimpleNamespace(incarnation="aa"))
    peers = ScriptedPeers(answer)
    reader = StartReader(store, None, sink, peers, FORM, [object()] * NUM_BUFFERS)
    store.start(reader, lambda call, *arguments: call(*arguments), woken.set)
    assert store.may_read(ADDRESS)
    store.read(JOB, MEMORY, lambda: None)
    await asyncio.wait_for(woken.wait(), 10.0)
    (ended,) = store.landed()
    assert (ended.job, ended.is_done, ended.is_write) == (JOB, False, False)
    assert len(reader._buffers) == NUM_BUFFERS
    ((address, ask),) = peers.asked
    assert (address, ask.key, ask.num_blocks) == (ADDRESS, b"k" * 16, 2)
    assert (ask.borrower, ask.fingerprint, ask.layout, ask.page_bytes) == ("aa", "f", "layout", 64)
    await reader.close()
    (kind,) = (kind for kind, number in store.figures.failures.items() if number)
    return kind, store.may_read(ADDRESS)


@pytest.mark.parametrize(
    ("answer", "kind", "may_ask_again"),
    [
        (BorrowReply(None, "gone"), "gone", True),
        (BorrowReply(None, "limit"), "limit", True),
        (BorrowReply(None, "form"), "form", False),
        (BorrowReply(None, "a later release's reason"), "gone", True),
        (BorrowReply(lent(block_pages=(5,))), "form", False),
        (BorrowReply(lent(state_pages=())), "form", False),
        (BorrowReply(lent(block_pages=(5, 9))), "form", False),
        (BorrowReply(lent(memory="VRAM")), "form", False),
        (BorrowReply(lent(address=(1 << 64) - 64)), "form", False),
        (BorrowReply(lent()), "form", False),
        (UnavailableError("nobody is there"), "lost", False),
        (DeadlineError("no answer"), "late", False),
        (ZeroDivisionError("a fault of ours"), "lost", False),
    ],
)
async def test_an_answer_that_is_of_no_use_costs_computing_alone(answer, kind, may_ask_again):
    assert await failure_of(answer) == (kind, may_ask_again)


async def test_no_more_starts_are_read_at_a_time_than_there_are_buffers():
    store = NeighbourStore()
    store.open(FORM)
    reader = StartReader(store, None, None, None, FORM, [])
    store.start(reader, lambda call, *arguments: call(*arguments), lambda: None)
    assert not store.may_read(ADDRESS)
    store.read(JOB, MEMORY, lambda: None)
    assert store.figures.failures["limit"] == 1
    assert not store.landed()[0].is_done


def test_estimates_follow_what_was_read_and_are_forgotten(monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(neighbour_store.time, "monotonic", lambda: now_s)
    store = NeighbourStore()
    store.open(FORM)
    assert store.seconds(4) == pytest.approx(FIRST_ASK_S, rel=0.01)
    for _ in range(50):
        store.was_read(JOB, 0, ask_s=1.0, read_s=4 * 64 / 100.0)
    assert store.seconds(0) == pytest.approx(1.0, rel=0.01)
    now_s += 31.0
    assert store.seconds(4) == pytest.approx(FIRST_ASK_S, rel=0.01)


def test_the_servers_that_are_left_alone_are_bounded():
    store = NeighbourStore()
    for number in range(2 * MAX_PAUSED):
        store.failed(FileJob((), b"", 0, (), (), address=f"10.0.0.2:{number}"), "lost", "away")
    assert len(store._paused_until_s) == MAX_PAUSED


def test_a_reason_of_a_later_release_to_keep_a_state_does_no_harm():
    assert [_place_of(lent(place=place)) for place in (0, 8, 9, -1)] == [
        *(Place.END, Place.BRANCH, Place.INNER, Place.INNER)
    ]
