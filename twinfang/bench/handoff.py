"""Compares a handoff between two processes with a raw NIXL READ of as many bytes in one region.

A handoff is timed as a request sees it: from ``TransferSink.read`` to its callback, including the second
READ, which checks the lease, and the threads in between. `raw` is the time that NIXL takes from making the
request to DONE, while both sides poll every 20 µs. `copy` is the time that this process takes to copy as many
bytes. Each round measures each of the three once. `behind` is the time that a request waits once its prompt
is computed: the blocks of all chunks of 2,048 tokens except the last were read before, as a server with
default flags reads them. It has separate rounds, each with a raw read.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.memory.caches import Caches
from kv_transfer.digester import Digester
from kv_transfer.handshake import introduce
from kv_transfer.nixl.agent import Ranges, TransferAgent, region_of
from kv_transfer.nixl.transfer_thread import TransferThread
from kv_transfer.reads.part import Part
from kv_transfer.reads.sink import TransferSink
from kv_transfer.reads.transfer import TransferListener, TransferResult
from twinfang.bench.case import Case
from twinfang.bench.machine import waited_s
from twinfang.bench.prefill_side import RAW_POLL_S, Ask, Source, prefill_side
from twinfang.bench.row import Round, Row
from wire.messages.handoff import Done, Region, Ticket

WARM_UP_ROUNDS = 3
DEADLINE_S = 60.0


def measure(cases: Sequence[Case], on_row: Callable[[Row], None] = lambda _row: None) -> list[Row]:
    """Returns a row for each case. ``on_row`` gets each row as soon as it is measured."""
    rows = []
    with prefill_side() as ask:
        for case in cases:
            rows.append(_measure(case, ask))
            on_row(rows[-1])
    return rows


def _measure(case: Case, ask: Ask) -> Row:
    caches = case.caches()
    ask(Source.open, case)
    end = End()
    thread, sink = open_sink(caches, end, ask)
    num_bytes = case.num_blocks * caches.kv_layout.unit_bytes + caches.state_layout.unit_bytes
    metadata, remote = ask(Source.open_raw, num_bytes)
    # The copy uses separate memory: otherwise it would leave the raw read's memory in the processor's caches.
    memory, copied, original = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(3))
    raw = TransferAgent(f"raw-sink-{time.monotonic_ns()}", [memory])
    peer = raw.add_peer(metadata)
    ranges = np.array([(memory.data_ptr(), remote.address, num_bytes)], dtype=np.uint64)

    num_descriptors = 0

    def read_raw() -> float:
        ask(Source.poll_raw)
        return _read_raw(raw, peer, ranges, region_of(memory), remote)

    def hand_over() -> float:
        nonlocal num_descriptors
        ticket = ask(Source.grant, case.block_ids)
        seconds, result = _hand_over(sink, end, ticket, case.block_ids)
        num_descriptors = result.num_descriptors
        return seconds

    def hand_over_behind() -> float:
        ticket = ask(Source.grant, case.block_ids)
        return _hand_over_behind(sink, end, ticket, case.block_ids, case.num_early_blocks)

    def rounds_of(hand_over: Callable[[], float]) -> list[Round]:
        rounds = []
        for turn in range(WARM_UP_ROUNDS + case.rounds):
            waited_before_s = waited_s([os.getpid()])
            copy_s = _copy(original, copied)
            if turn % 2:  # the order alternates, so that both find the processor's caches in the same state
                handoff_s, raw_s = hand_over(), read_raw()
            else:
                raw_s, handoff_s = read_raw(), hand_over()
            rounds.append(Round(copy_s, raw_s, handoff_s, waited_s([os.getpid()]) - waited_before_s))
        return rounds[WARM_UP_ROUNDS:]

    rounds = rounds_of(hand_over)
    behind = rounds_of(hand_over_behind) if case.num_early_blocks else []
    raw.close()
    thread.close()
    return Row.of(case, num_bytes, num_descriptors, rounds, behind)


def open_sink(
    caches: Caches, end: End, ask: Ask, digester: Digester | None = None
) -> tuple[TransferThread, TransferSink]:
    """Opens a sink that has done the handshake with the other process. The caller closes its thread."""
    thread = TransferThread(caches, f"sink-{time.monotonic_ns()}", end.failed)
    sink = TransferSink(thread, introduce(caches, thread.agent.name, "fp"), end, digester=digester)
    thread.start(sink)
    sink.add_peer("127.0.0.1:1", ask(Source.handshake, sink.introduction))
    return thread, sink


def _copy(memory: torch.Tensor, copied: torch.Tensor) -> float:
    started = time.perf_counter()
    copied.copy_(memory)
    return time.perf_counter() - started


def _read_raw(agent: TransferAgent, peer: str, ranges: Ranges, local: Region, remote: Region) -> float:
    started = time.perf_counter()
    read = agent.read(peer, ranges, local=local, remote=remote)
    while read.poll() == "busy":
        time.sleep(RAW_POLL_S)
    seconds = time.perf_counter() - started
    assert read.poll() == "done"
    read.release()
    return seconds


def _hand_over(
    sink: TransferSink, end: End, ticket: Ticket, block_ids: list[int]
) -> tuple[float, TransferResult]:
    end.start()
    sink.read(ticket, block_ids=block_ids, state_slot=1, deadline_s=DEADLINE_S)
    return end.wait()


def _hand_over_behind(
    sink: TransferSink, end: End, ticket: Ticket, block_ids: list[int], num_early: int
) -> float:
    """Returns the seconds from the moment at which the last part can be read. The other parts' blocks have
    arrived by then."""
    begun_at = sink.counts.num_parts
    transfer = sink.begin(ticket.request_id, ticket.incarnation, deadline_s=DEADLINE_S)
    transfer.read_part(Part(block_ids[:num_early], ticket.block_ids[:num_early]))
    while sink.counts.num_parts == begun_at:
        time.sleep(RAW_POLL_S)
    end.start()
    last = Part(block_ids[num_early:], ticket.block_ids[num_early:], [1], [ticket.state_slot])
    transfer.finish(last, Done(ticket.lease_id, ticket.epoch))
    seconds, _ = end.wait()
    return seconds


class End(TransferListener):
    """Listens to the sink and measures the time from :meth:`start` to the end of a transfer."""

    def __init__(self) -> None:
        self._done: queue.SimpleQueue[tuple[float, TransferResult]] = queue.SimpleQueue()
        self._started = 0.0

    def start(self) -> None:
        self._started = time.perf_counter()

    def transferred(self, result: TransferResult) -> None:
        self._done.put((time.perf_counter() - self._started, result))

    def failed(self, fault: BaseException) -> None:
        """Raises the fault, which ends the transfer thread."""
        raise fault

    def wait(self) -> tuple[float, TransferResult]:
        seconds, result = self._done.get(timeout=2 * DEADLINE_S)
        if result.error is not None:
            raise result.error
        return seconds, result
