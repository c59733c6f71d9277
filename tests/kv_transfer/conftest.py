"""Sinks (readers) in the test's process, sources (lenders) in other processes."""

from __future__ import annotations

import dataclasses
import os
import queue
import secrets
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from kv_transfer.digester import Digester
from kv_transfer.handshake import introduce
from kv_transfer.nixl.transfer_thread import TransferThread
from kv_transfer.reads.sink import TransferSink
from kv_transfer.reads.transfer import TransferResult
from testing.kv_transfer.pools import PoolShape, poison, transport_variables
from testing.kv_transfer.source_process import ADDRESS, DEADLINE_S, SourceProcess
from wire.messages.handoff import Ticket


@pytest.fixture(scope="module")
def sink() -> Iterator[TransferSink]:
    """A sink that has not connected to any source yet."""
    decode = Decode(PoolShape())
    yield decode.sink
    decode.close()
    assert decode.faults.empty()


class Decode:
    """A decode server's memory and sink, and a listener that puts the sink's calls into queues."""

    def __init__(self, shape: PoolShape, fingerprint: str = "fp", *, verifies: bool = False) -> None:
        self.shape = shape
        self.caches = shape.caches()
        poison(self.caches)
        self.results: queue.Queue[TransferResult] = queue.Queue()
        self.settled: queue.Queue[str] = queue.Queue()
        self.faults: queue.Queue[BaseException] = queue.Queue()
        self._is_closed = False
        introduction = introduce(self.caches, f"sink-{secrets.token_hex(4)}", fingerprint)
        listener = SimpleNamespace(transferred=self._transferred, settled=self.settled.put)
        self.thread = TransferThread(self.caches, introduction.incarnation, self.faults.put)
        self.digester = Digester(self.caches, self.faults.put) if verifies else None
        self.sink = TransferSink(self.thread, introduction, listener, digester=self.digester)
        self.thread.start(self.sink)
        self.callback_is_broken = False

    def _transferred(self, result: TransferResult) -> None:
        if self.callback_is_broken:
            raise ZeroDivisionError("a fault of ours")
        self.results.put(result)

    def connect(self, source: SourceProcess, address: str = ADDRESS) -> None:
        self.sink.add_peer(address, source.handshake(self.sink.introduction))

    def start(
        self, ticket: Ticket, block_ids: list[int], state_slot: int, deadline_s: float = DEADLINE_S
    ) -> None:
        self.sink.read(ticket, block_ids=block_ids, state_slot=state_slot, deadline_s=deadline_s)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self.digester is not None:
                self.digester.close()
            self.thread.close()

    def result(self, timeout_s: float = DEADLINE_S) -> TransferResult:
        return self.results.get(timeout=timeout_s)

    def read(
        self, ticket: Ticket, block_ids: list[int], state_slot: int, deadline_s: float = DEADLINE_S
    ) -> TransferResult:
        self.start(ticket, block_ids, state_slot, deadline_s)
        return self.result(deadline_s + DEADLINE_S)


@dataclasses.dataclass
class Pair:
    """A prefill and a decode server that have shaken hands."""

    source: SourceProcess
    decode: Decode
    incarnation: str


@pytest.fixture(scope="session")
def shared_source() -> Iterator[SourceProcess]:
    """One process for all tests that leave it alive; each opens its own source in it."""
    process = SourceProcess()
    yield process
    assert process.quit() == 0


@pytest.fixture
def own_source() -> Iterator[Callable[[], SourceProcess]]:
    """Makes source processes that the test may kill and freeze."""
    processes: list[SourceProcess] = []

    def start() -> SourceProcess:
        processes.append(SourceProcess())
        return processes[-1]

    yield start
    for process in processes:
        process.quit()


@pytest.fixture
def make_decode(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Decode]]:
    made: list[Decode] = []

    def make(
        shape: PoolShape, *, transport: str = "default", fingerprint: str = "fp", verifies: bool = False
    ) -> Decode:
        for name, value in transport_variables(transport).items():
            monkeypatch.setitem(os.environ, name, value)
        made.append(Decode(shape, fingerprint, verifies=verifies))
        return made[-1]

    yield make
    for decode in made:
        decode.close()
        assert decode.faults.empty(), decode.faults.get()


@pytest.fixture
def make_pair(make_decode: Callable[..., Decode], shared_source: SourceProcess) -> Callable[..., Pair]:
    """Connects a new sink to a new source, of the shared process unless another is given."""

    def make(
        shape: PoolShape | None = None,
        *,
        decode_shape: PoolShape | None = None,
        transport: str = "default",
        source: SourceProcess | None = None,
        verifies: bool = False,
        **settings: object,
    ) -> Pair:
        shape = shape or PoolShape()
        source = source or shared_source
        incarnation = source.open(shape, environment=transport_variables(transport), **settings)  # type: ignore[arg-type]
        decode = make_decode(decode_shape or shape, transport=transport, verifies=verifies)
        decode.connect(source)
        return Pair(source, decode, incarnation)

    return make
