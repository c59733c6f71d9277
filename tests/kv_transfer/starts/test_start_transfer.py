"""Pages that are lent are read through a buffer by NIXL, and used only if all of them are what was lent."""

from __future__ import annotations

import queue
import secrets

import pytest
import torch

from engine.files.start_files import FileJob
from kv_transfer.handshake import introduce
from kv_transfer.leases.source import SourceListener, TransferSource
from kv_transfer.nixl.agent import region_of
from kv_transfer.nixl.transfer_thread import TransferThread
from kv_transfer.reads.sink import TransferSink
from kv_transfer.reads.transfer import TransferListener
from kv_transfer.starts import start_transfer
from kv_transfer.starts.page_digests import page_digests
from kv_transfer.starts.start_transfer import Buffer, StartTransfer
from testing.kv_transfer.pools import PoolShape
from wire.messages.handoff import EndLease
from wire.messages.neighbours import LentStart

TIMEOUT_S = 20.0
PAGE, NUM_PAGES, BUFFER_PAGES = 1024, 40, 4
JOB = FileJob((b"k",) * 9, b"", 9, tuple(range(11, 20)), (30, 25))
SOURCES = ((3, 4, 5, 9, 8, 20, 21, 40, 1), (12, 13))


class Server(TransferListener, SourceListener):
    """Host memory of one server, which it lends and reads into."""

    def __init__(self, seed):
        caches = PoolShape().caches()
        self.ended, self.faults = queue.Queue(), queue.Queue()
        self.address = f"{secrets.token_hex(4)}:1"
        introduction = introduce(caches, f"server-{secrets.token_hex(4)}", "fp")
        self.thread = TransferThread(caches, introduction.incarnation, self.faults.put)
        generator = torch.Generator().manual_seed(seed)
        self.pages = torch.randint(0, 256, (NUM_PAGES, PAGE), dtype=torch.uint8, generator=generator)
        self.buffer = torch.zeros(BUFFER_PAGES, PAGE, dtype=torch.uint8)
        for tensor in (self.pages, self.buffer):
            self.thread.agent.register(tensor)
        self.sink = TransferSink(self.thread, introduction, self)
        self.source = TransferSource(
            *(self.thread, introduction, self),
            address=self.address,
            lease_ttl_s=600.0,
            max_leases=4,
            max_loans=4,
        )
        self.thread.start(self.source, self.sink)

    def loan_ended(self, lease):
        self.ended.put(lease)

    def lend(self, *, digests=True, pages=SOURCES):
        lease = self.source.lend("a start")
        sums = page_digests(self.pages.view(-1), PAGE)([page - 1 for page in (*pages[0], *pages[1])])
        fields = (self.sink.introduction.incarnation, lease.lease_id, lease.epoch, 10.0)
        region = region_of(self.pages)
        return LentStart(*fields, region, *pages, place=0, digests=tuple(sums) if digests else ())

    def read(self, lent):
        """Reads a loan; returns the error, once the buffer is free again."""
        results, freed = queue.Queue(), queue.Queue()
        digests = page_digests(self.buffer.view(-1), PAGE)
        transfer = StartTransfer(
            *(self.thread, self.sink.setup.check, self.sink.setup.peers.get(lent.incarnation), lent, JOB),
            *(self.pages.numpy(), Buffer(region_of(self.buffer), self.buffer.numpy(), digests)),
            on_end=results.put,
            on_free=lambda: freed.put(None),
        )
        self.thread.post(transfer.go_on)
        error = results.get(timeout=TIMEOUT_S)
        freed.get(timeout=TIMEOUT_S)
        assert results.empty()
        assert freed.empty()
        return error

    def of(self, pages):
        return self.pages[[page - 1 for page in (*pages[0], *pages[1])]]

    def close(self):
        self.thread.close()
        assert self.faults.empty(), self.faults.get()


@pytest.fixture(scope="module")
def servers(patient):
    reader, lender = Server(1), Server(2)
    reader.sink.add_peer(lender.address, lender.source.handshake(reader.sink.introduction))
    yield reader, lender
    for server in (reader, lender):
        server.close()


TARGETS = (JOB.block_pages, JOB.state_pages)


@pytest.mark.parametrize("digests", [True, False])
def test_all_pages_arrive_and_the_loan_ends(servers, digests):
    reader, lender = servers
    reader.pages.fill_(0)
    assert reader.read(lender.lend(digests=digests)) is None
    assert torch.equal(reader.of(TARGETS), lender.of(SOURCES))
    assert int(reader.pages.any(dim=1).sum()) == JOB.num_pages, "and nothing else"
    lease = lender.ended.get(timeout=TIMEOUT_S)
    assert lease.reason == "done"
    assert lender.source.num_leases == 0


def test_a_loan_that_has_ended_is_of_no_use(servers):
    reader, lender = servers
    lent = lender.lend()
    lender.source.end(EndLease("a start", lent.lease_id, lent.epoch))
    assert lender.ended.get(timeout=TIMEOUT_S).reason == "ended"
    assert reader.read(lent).cause == "lease_ended"


def test_other_bytes_than_were_lent_are_noticed(servers):
    reader, lender = servers
    lent = lender.lend()
    lender.pages[SOURCES[1][1] - 1, 77] ^= 1
    assert reader.read(lent).cause == "digest"
    lender.source.end(EndLease("a start", lent.lease_id, lent.epoch))
    lender.ended.get(timeout=TIMEOUT_S)


def test_pages_of_a_loan_that_has_ended_may_be_another_start_s(servers):
    reader, lender = servers
    lent = lender.lend()
    lender.source.end(EndLease("a start", lent.lease_id, lent.epoch))
    lender.ended.get(timeout=TIMEOUT_S)
    lender.pages[SOURCES[0][0] - 1].fill_(0)
    assert reader.read(lent).cause == "lease_ended", "nothing was damaged on its way"


def test_a_page_outside_of_the_lender_s_memory_is_refused(servers):
    reader, lender = servers
    lent = lender.lend()
    wrong = LentStart(
        *(lent.incarnation, lent.lease_id, lent.epoch, 10.0, lent.region),
        *((*SOURCES[0][:-1], NUM_PAGES + 100_000), SOURCES[1]),
        place=0,
    )
    assert reader.read(wrong) is not None
    lender.source.end(EndLease("a start", lent.lease_id, lent.epoch))
    lender.ended.get(timeout=TIMEOUT_S)


def test_a_start_that_takes_too_long_is_given_up(servers, monkeypatch):
    reader, lender = servers
    reader.sink.add_peer(lender.address, lender.source.handshake(reader.sink.introduction))
    monkeypatch.setattr(start_transfer, "TRANSFER_S", -1.0)
    lent = lender.lend()
    assert reader.read(lent).cause == "deadline"
    lender.source.end(EndLease("a start", lent.lease_id, lent.epoch))
    lender.ended.get(timeout=TIMEOUT_S)
