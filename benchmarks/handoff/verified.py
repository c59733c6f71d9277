"""What verifying costs: the same handoffs with digests and without, in turns, between one pair of processes.

    python -m benchmarks.handoff.verified
    UCX_TLS=tcp python -m benchmarks.handoff.verified --json result.json

`handoff` is the time from the ticket until all is read and validated. `verified` is the same with digests in
the ticket. `digested` is what the lending server computes before the ticket goes out, if nothing of the
prompt was digested before. `last chunk` leaves out the blocks of earlier chunks, which are digested while the
next chunk is computed. Medians; `more` is the median of each pair's difference, over the half of the pairs in
which this process waited least for a core.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.handoff.raw_read import LARGE, ONE_BLOCK
from kv_transfer.digester import Digester
from kv_transfer.leases.seals import DigestSeals
from twinfang.bench.case import Case
from twinfang.bench.handoff import DEADLINE_S, End, open_sink
from twinfang.bench.machine import machine, waited_s
from twinfang.bench.prefill_side import Ask, Source, prefill_side
from wire.messages.handoff import Ticket

WARM_UP_PAIRS = 5
BIG_STATE = replace(LARGE, mamba_heads=272)
"""A state of 51 MB, as of Nemotron-H 8B, and blocks of 48 KB."""
CASES = (
    replace(ONE_BLOCK, rounds=400),
    Case("64 MB: 6 MB of state, the rest blocks", LARGE, 16, 1180, scattered=False, rounds=100),
    Case("64 MB, scattered", LARGE, 16, 1180, scattered=True, rounds=60),
    Case("64 MB: 51 MB of state, the rest blocks", BIG_STATE, 16, 270, scattered=False, rounds=100),
)


@dataclass(frozen=True)
class Row:
    """Medians of one case, in microseconds."""

    name: str
    num_bytes: int
    pairs: int
    handoff_us: float
    verified_us: float
    more_us: float
    more_share: float
    best_handoff_us: float
    best_verified_us: float
    reader_cpu_us: float
    """Processor time of the reading process for one comparison."""
    digested_us: float
    last_chunk_digested_us: float

    def __str__(self) -> str:
        return (
            f"{self.name:<42} {self.num_bytes / 1e6:>6.1f} {self.handoff_us:>10,.0f}"
            f" {self.verified_us:>10,.0f} {self.more_us:>8,.0f} {self.more_share:>7.1%}"
            f" {self.digested_us:>10,.0f} {self.last_chunk_digested_us:>12,.0f}"
        )


HEADER = (
    f"{'':<42} {'MB':>6} {'handoff µs':>10} {'verified':>10} {'more':>8} {'':>7} {'digested':>10}"
    f" {'last chunk':>12}"
)


def digest(source: Source, ticket: Ticket, num_known: int) -> tuple[Ticket, float]:
    """Returns the ticket with digests, and how long the digests of all but ``num_known`` blocks took. Runs in
    the lending process."""
    digester = Digester(source.caches, source.failed)
    sealed: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
    seals = DigestSeals(digester, lambda then, *arguments: then(*arguments), only_quick=False)
    seals.seal(ticket, sealed.put)
    whole = sealed.get()
    began = time.perf_counter()
    digester.blocks(ticket.block_ids[num_known:])
    digester.state(ticket.state_slot)
    seconds = time.perf_counter() - began
    digester.close()
    return whole, seconds


def _measure(case: Case, ask: Ask) -> Row:
    caches = case.caches()
    ask(Source.open, case)
    end = End()
    digester = Digester(caches, end.failed)
    thread, sink = open_sink(caches, end, ask, digester)
    pairs: list[tuple[float, float, float, float]] = []
    digested: list[float] = []
    last_chunk: list[float] = []

    def hand_over(ticket: Ticket) -> tuple[float, float]:
        cpu_s = time.process_time()
        end.start()
        sink.read(ticket, block_ids=case.block_ids, state_slot=1, deadline_s=DEADLINE_S)
        seconds, _ = end.wait()
        return seconds, time.process_time() - cpu_s

    for turn in range(WARM_UP_PAIRS + case.rounds):
        waited_before_s = waited_s([os.getpid()])
        plain = ask(Source.grant, case.block_ids)
        sealed, seconds = ask(digest, ask(Source.grant, case.block_ids), 0)
        digested.append(seconds)
        last_chunk.append(ask(digest, plain, case.num_early_blocks)[1])
        if turn % 2:
            (verified_s, verified_cpu_s), (plain_s, plain_cpu_s) = hand_over(sealed), hand_over(plain)
        else:
            (plain_s, plain_cpu_s), (verified_s, verified_cpu_s) = hand_over(plain), hand_over(sealed)
        if turn >= WARM_UP_PAIRS:
            waited = waited_s([os.getpid()]) - waited_before_s
            pairs.append((waited, plain_s, verified_s, verified_cpu_s - plain_cpu_s))
    thread.close()
    digester.close()
    quiet = sorted(pairs)[: -(-len(pairs) // 2)]
    num_bytes = case.num_blocks * caches.kv_layout.unit_bytes + caches.state_layout.unit_bytes
    handoff_us = statistics.median(plain for _, plain, _, _ in quiet) * 1e6
    more_us = statistics.median(verified - plain for _, plain, verified, _ in quiet) * 1e6
    return Row(
        case.name,
        num_bytes,
        len(quiet),
        handoff_us=handoff_us,
        verified_us=statistics.median(verified for _, _, verified, _ in quiet) * 1e6,
        more_us=more_us,
        more_share=more_us / handoff_us,
        best_handoff_us=min(plain for _, plain, _, _ in pairs) * 1e6,
        best_verified_us=min(verified for _, _, verified, _ in pairs) * 1e6,
        reader_cpu_us=statistics.median(cpu for _, _, _, cpu in quiet) * 1e6,
        digested_us=statistics.median(digested) * 1e6,
        last_chunk_digested_us=statistics.median(last_chunk) * 1e6,
    )


def _main(json_path: Path | None) -> None:
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    facts = machine() | {"UCX_TLS": os.environ.get("UCX_TLS", "as UCX picks")}
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    print(HEADER, flush=True)
    rows = []
    with prefill_side() as ask:
        for case in CASES:
            rows.append(_measure(case, ask))
            print(rows[-1], flush=True)
    if json_path is not None:
        result = {"machine": facts, "handoffs": [asdict(row) for row in rows]}
        json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    _main(parser.parse_args().json)
