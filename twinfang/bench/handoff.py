"""A handoff between two processes beside a raw NIXL READ of as many bytes in one region.

    python -m benchmarks.transfer                        # the transport that UCX picks
    UCX_TLS=tcp python -m benchmarks.transfer            # one whose target takes part in a READ
    python -m benchmarks.transfer --json result.json
    twinfang bench transfer                              # prompts of several lengths, of a model's shape

A handoff is timed as a request sees it: from ``TransferSink.read`` to its callback, with the second READ that
checks the lease and the threads in between. Raw is what NIXL takes from making the request to DONE, both
sides polling every 20 µs; copy is what this process takes to copy as many bytes. Each round has one of each.
`behind` is what a request waits for once its prompt is computed: blocks of all chunks of 2,048 tokens but the
last were read before, as a server with default flags reads them; rounds of its own, each with a raw read.
Medians are shown, `ratio` and `extra` those of the rounds' own ratios and differences, over the half of the
rounds in which this process waited least for a core. Below, what both processes take of a core while nothing
moves.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.machine import machine, waited_s
from benchmarks.transfer_case import ONE_BLOCK, Case, default_cases
from benchmarks.transfer_row import HEADER, Round, Row
from benchmarks.transfer_source import RAW_POLL_S, Ask, cpu_share, prefill_side
from engine.caches import Caches
from kv_transfer.agent import Ranges, TransferAgent, region_of
from kv_transfer.handshake import introduce
from kv_transfer.part import Part
from kv_transfer.sink import TransferSink
from kv_transfer.transfer import TransferListener, TransferResult
from wire.handoff import Done, Region, Ticket

WARM_UP_ROUNDS = 3
IDLE_S = 3.0
DEADLINE_S = 60.0


def measure(cases: Sequence[Case], on_row: Callable[[Row], None] = lambda _row: None) -> list[Row]:
    """A row a case; ``on_row`` gets each as soon as it is there."""
    rows = []
    with prefill_side() as ask:
        for case in cases:
            rows.append(_measure(case, ask))
            on_row(rows[-1])
    return rows


def _main(json_path: Path | None) -> None:
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    facts = machine()
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    print(HEADER, flush=True)
    rows = measure(default_cases(), lambda row: print(row, flush=True))
    with prefill_side() as ask:
        idle = _measure_idle(ask)
    for name, share in idle.items():
        print(f"{name:<50} {share:>8.2%} of a core")
    if json_path is not None:
        result = {
            "machine": facts,
            "handoffs": [row.figures() for row in rows],
            "idle_core_share": idle,
        }
        json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _measure(case: Case, ask: Ask) -> Row:
    caches = case.caches()
    ask("open", case)
    end = _End()
    sink = _open_sink(caches, end, ask)
    num_bytes = case.num_blocks * caches.kv_layout.unit_bytes + caches.state_layout.unit_bytes
    metadata, remote = ask("open_raw", num_bytes)
    # The copy has memory of its own: it would leave the raw read's in the processor's caches.
    memory, copied, original = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(3))
    raw = TransferAgent(f"raw-sink-{time.monotonic_ns()}", [memory])
    peer = raw.add_peer(metadata)
    ranges = np.array([(memory.data_ptr(), remote.address, num_bytes)], dtype=np.uint64)

    num_descriptors = 0

    def read_raw() -> float:
        ask("poll_raw")
        return _read_raw(raw, peer, ranges, region_of(memory), remote)

    def hand_over() -> float:
        nonlocal num_descriptors
        ticket = ask("grant", case.block_ids)
        seconds, result = _hand_over(sink, end, ticket, case.block_ids)
        num_descriptors = result.num_descriptors
        return seconds

    def hand_over_behind() -> float:
        ticket = ask("grant", case.block_ids)
        return _hand_over_behind(sink, end, ticket, case.block_ids, case.num_early_blocks)

    def rounds_of(hand_over: Callable[[], float]) -> list[Round]:
        rounds = []
        for turn in range(WARM_UP_ROUNDS + case.rounds):
            waited_before_s = waited_s([os.getpid()])
            copy_s = _copy(original, copied)
            if turn % 2:  # what the one before leaves in the processor's caches is the same for both
                handoff_s, raw_s = hand_over(), read_raw()
            else:
                raw_s, handoff_s = read_raw(), hand_over()
            rounds.append(Round(copy_s, raw_s, handoff_s, waited_s([os.getpid()]) - waited_before_s))
        return rounds[WARM_UP_ROUNDS:]

    rounds = rounds_of(hand_over)
    behind = rounds_of(hand_over_behind) if case.num_early_blocks else []
    raw.close()
    sink.close()
    return Row.of(case, num_bytes, num_descriptors, rounds, behind)


def _open_sink(caches: Caches, end: _End, ask: Ask) -> TransferSink:
    sink = TransferSink(caches, introduce(caches, f"sink-{time.monotonic_ns()}", "fp"), end)
    sink.add_peer("127.0.0.1:1", ask("handshake", sink.introduction))
    return sink


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
    sink: TransferSink, end: _End, ticket: Ticket, block_ids: list[int]
) -> tuple[float, TransferResult]:
    end.start()
    sink.read(ticket, block_ids=block_ids, state_slot=1, deadline_s=DEADLINE_S)
    return end.wait()


def _hand_over_behind(
    sink: TransferSink, end: _End, ticket: Ticket, block_ids: list[int], num_early: int
) -> float:
    """Seconds from when the last part can be read; the others' blocks have landed by then."""
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


class _End(TransferListener):
    """Listens to the sink: takes the time from :meth:`start` until a transfer has ended."""

    def __init__(self) -> None:
        self._done: queue.SimpleQueue[tuple[float, TransferResult]] = queue.SimpleQueue()
        self._started = 0.0

    def start(self) -> None:
        self._started = time.perf_counter()

    def transferred(self, result: TransferResult) -> None:
        self._done.put((time.perf_counter() - self._started, result))

    def failed(self, fault: BaseException) -> None:
        """Ends the transfer thread with its error."""
        raise fault

    def wait(self) -> tuple[float, TransferResult]:
        seconds, result = self._done.get(timeout=2 * DEADLINE_S)
        if result.error is not None:
            raise result.error
        return seconds, result


def _measure_idle(ask: Ask) -> dict[str, float]:
    """Share of a core with a connected peer and nothing to move."""
    case = ONE_BLOCK
    ask("open", case)
    sink = _open_sink(case.caches(), _End(), ask)
    ticket = ask("grant", case.block_ids)
    shares = {"prefill side, one lease held and not read": ask("cpu_share", IDLE_S)}
    ask("end", ticket)
    time.sleep(CONNECT_WINDOW_S)
    shares["prefill side, no lease"] = ask("cpu_share", IDLE_S)
    shares["decode side, no read"] = cpu_share(IDLE_S)
    sink.close()
    return shares


CONNECT_WINDOW_S = 6.0
"""After a handshake the source polls for a while, so that the peer can connect."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    _main(parser.parse_args().json)
