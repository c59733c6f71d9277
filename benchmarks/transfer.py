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
import itertools
import json
import logging
import multiprocessing
import os
import queue
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import machine, waited_s
from engine.caches import Caches, CacheSpec
from engine.config import EngineConfig
from engine.model_config import ModelConfig
from kv_transfer.agent import Ranges, TransferAgent, region_of
from kv_transfer.part import Part
from kv_transfer.sink import TransferSink
from kv_transfer.source import TransferSource
from kv_transfer.transfer import TransferResult
from twinfang.flag_table import BUNDLED_MODEL
from wire.handoff import Done, EndLease, HandshakeReply, HandshakeRequest, Region, Ticket

RAW_POLL_S = 20e-6
WARM_UP_ROUNDS = 3
IDLE_S = 3.0
DEADLINE_S = 60.0
CHUNK_TOKENS = EngineConfig.max_batch_tokens


@dataclass(frozen=True)
class Case:
    """Pools of one model's shape, and how many blocks of them move with the state."""

    name: str
    spec: CacheSpec
    block_size: int
    num_blocks: int
    scattered: bool
    rounds: int

    def caches(self) -> Caches:
        caches = Caches(
            self.spec,
            num_blocks=2 * self.num_blocks + 2,
            num_slots=3,
            block_size=self.block_size,
            device="cpu",
        )
        caches.kv.fill_(1)  # memory that was never touched is not there yet
        caches.state.fill_(1)
        return caches

    @property
    def num_early_blocks(self) -> int:
        """What is read while the last chunk is computed: the full blocks of those before it."""
        per_chunk = CHUNK_TOKENS // self.block_size
        return (self.num_blocks - 1) // per_chunk * per_chunk

    @property
    def block_ids(self) -> list[int]:
        step = 2 if self.scattered else 1
        return list(range(1, 1 + step * self.num_blocks, step))


def _spec(*, attn_layers: int, kv_heads: int, mamba_layers: int, mamba_heads: int) -> CacheSpec:
    return CacheSpec(
        attn_layers=attn_layers,
        kv_heads=kv_heads,
        head_dim=64,
        kv_dtype=torch.bfloat16,
        mamba_layers=mamba_layers,
        conv_channels=256,
        conv_width=4,
        mamba_heads=mamba_heads,
        mamba_head_dim=32,
        state_size=64,
        conv_dtype=torch.bfloat16,
        ssm_dtype=torch.float32,
    )


SMALL = _spec(attn_layers=1, kv_heads=2, mamba_layers=3, mamba_heads=4)
LARGE = _spec(attn_layers=6, kv_heads=2, mamba_layers=23, mamba_heads=32)


def prompt_case(spec: CacheSpec, *, block_size: int, prompt_len: int, rounds: int) -> Case:
    """A prompt's blocks in one run, as a pool that is not worn hands them out."""
    num_blocks = -(-prompt_len // block_size)
    return Case(f"{prompt_len:,} tokens", spec, block_size, num_blocks, scattered=False, rounds=rounds)


ONE_BLOCK = Case("one block of 8 KB, state of 100 KB", SMALL, 16, 1, scattered=False, rounds=400)


def default_cases() -> list[Case]:
    """Prompts of the bundled model and of a larger one, in one run and scattered over the pools."""
    bundled = ModelConfig.from_directory(BUNDLED_MODEL, "auto", "cpu").cache_spec()
    cases = [ONE_BLOCK]
    for name, spec in (("bundled", bundled), ("48 KB blocks, 6 MB state", LARGE)):
        for prompt_len, rounds in ((16, 400), (1024, 400), (4096, 400), (16384, 120)):
            case = prompt_case(spec, block_size=16, prompt_len=prompt_len, rounds=rounds)
            cases.append(replace(case, name=f"{name}: {case.name}"))
            if prompt_len >= 4096:
                cases.append(replace(cases[-1], name=f"{cases[-1].name}, scattered", scattered=True))
    return cases


@dataclass(frozen=True)
class Round:
    """One of each, one after the other; seconds."""

    copy_s: float
    raw_s: float
    handoff_s: float
    waited_s: float
    """How long this process was ready to run and had no core."""


@dataclass(frozen=True)
class Row:
    """Medians of one case."""

    name: str
    num_bytes: int
    num_descriptors: int
    rounds: int
    copy_us: float
    """Of a copy within one process."""
    raw_us: float
    handoff_us: float
    ratio: float
    """A handoff's time to that of the raw read beside it."""
    extra_us: float
    """By how much it takes longer."""
    behind_us: float | None
    """What is left of it when all chunks but the last were read before; None: there is one chunk."""
    behind_ratio: float | None
    best_raw_us: float
    """Least times, which a busy machine moves less."""
    best_handoff_us: float

    @classmethod
    def of(
        cls, case: Case, num_bytes: int, num_descriptors: int, rounds: list[Round], behind: list[Round]
    ) -> Row:
        quiet, quiet_behind = _quiet_half(rounds), _quiet_half(behind)
        return cls(
            case.name,
            num_bytes,
            num_descriptors,
            len(quiet),
            copy_us=_median_us(one.copy_s for one in quiet),
            raw_us=_median_us(one.raw_s for one in quiet),
            handoff_us=_median_us(one.handoff_s for one in quiet),
            ratio=_median_ratio(quiet),
            extra_us=_median_us(one.handoff_s - one.raw_s for one in quiet),
            behind_us=_median_us(one.handoff_s for one in quiet_behind) if behind else None,
            behind_ratio=_median_ratio(quiet_behind) if behind else None,
            best_raw_us=min(one.raw_s for one in rounds) * 1e6,
            best_handoff_us=min(one.handoff_s for one in rounds) * 1e6,
        )

    def figures(self) -> dict[str, object]:
        return {
            **asdict(self),
            "share_of_raw_bandwidth": 1 / self.ratio,
            "behind_share_of_raw_bandwidth": None if self.behind_ratio is None else 1 / self.behind_ratio,
            "ratio_to_copy": self.handoff_us / self.copy_us,
        }

    def __str__(self) -> str:
        times = "".join(
            f" {us:>10,.0f} {self.num_bytes / us / 1e3:>6.2f}"
            for us in (self.copy_us, self.raw_us, self.handoff_us)
        )
        return (
            f"{self.name:<50} {self.num_descriptors:>5} {self.num_bytes / 1e3:>9,.0f} KB{times}"
            f" {self.ratio:>6.2f} {self.extra_us:>9,.0f}"
            + ("" if self.behind_us is None else f" {self.behind_us:>10,.0f} {self.behind_ratio:>6.2f}")
        )


def _quiet_half(rounds: list[Round]) -> list[Round]:
    return sorted(rounds, key=lambda one: one.waited_s)[: -(-len(rounds) // 2)]


def _median_us(seconds: Iterable[float]) -> float:
    return statistics.median(seconds) * 1e6


def _median_ratio(rounds: list[Round]) -> float:
    return statistics.median(one.handoff_s / one.raw_s for one in rounds)


HEADER = (
    f"{'':<50} {'descr':>5} {'moved':>12} {'copy µs':>10} {'GB/s':>6} {'raw µs':>10} {'GB/s':>6}"
    f" {'handoff µs':>10} {'GB/s':>6} {'ratio':>6} {'extra µs':>9}"
    f" {'behind µs':>10} {'ratio':>6}"
)


# --- the prefill side's process -----------------------------------------------------------------


class _Source:
    """Answers the commands of :func:`_main`; one case at a time."""

    def __init__(self) -> None:
        self._source: TransferSource | None = None
        self._raw: TransferAgent | None = None

    def open(self, case: Case) -> None:
        self.close()
        self._caches = case.caches()
        self._source = TransferSource(
            self._caches,
            address="127.0.0.1:1",
            incarnation=f"source-{time.monotonic_ns()}",
            fingerprint="fp",
            lease_ttl_s=3600.0,
            max_leases=8,
            on_lease_ended=lambda _lease: None,
            on_fatal=_fail,
        )

    def handshake(self, request: HandshakeRequest) -> HandshakeReply:
        assert self._source is not None
        return self._source.handshake(request)

    def grant(self, block_ids: list[int]) -> Ticket:
        assert self._source is not None
        return self._source.grant("bench", num_tokens=1, block_ids=block_ids, state_slot=1)

    def end(self, ticket: Ticket) -> None:
        assert self._source is not None
        self._source.end(EndLease(ticket.request_id, ticket.lease_id, ticket.epoch))

    def open_raw(self, num_bytes: int) -> tuple[bytes, Region]:
        self._memory = torch.ones(num_bytes, dtype=torch.uint8)
        self._raw = TransferAgent(f"raw-{time.monotonic_ns()}", [self._memory])
        return self._raw.metadata, region_of(self._memory)

    def poll_raw(self, pipe: Connection) -> None:
        """Until the next command comes."""
        assert self._raw is not None
        for turn in itertools.count():
            self._raw.poll()
            time.sleep(RAW_POLL_S)
            if turn % 16 == 0 and pipe.poll():
                return

    def cpu_share(self, wall_s: float) -> float:
        return _cpu_share(wall_s)

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
        if self._raw is not None:
            self._raw.close()
        self._source, self._raw = None, None


def _serve(pipe: Connection) -> None:
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    server = _Source()
    while True:
        command, arguments = pipe.recv()
        if command == "poll_raw":
            pipe.send(None)
            server.poll_raw(pipe)
            continue
        pipe.send(getattr(server, command)(*arguments))
        if command == "close":
            return


# --- the decode side's ------------------------------------------------------------------------------


Ask = Callable[..., Any]


@contextmanager
def _prefill_side() -> Iterator[Ask]:
    """The other process; what is yielded runs a command there."""
    pipe, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,))
    process.start()
    theirs.close()  # else this process would wait for ever for the answer of one that has died

    def ask(command: str, *arguments: Any) -> Any:
        pipe.send((command, arguments))
        return pipe.recv()

    try:
        yield ask
        ask("close")
    finally:
        pipe.close()
        process.join()


def measure(cases: Sequence[Case], on_row: Callable[[Row], None] = lambda _row: None) -> list[Row]:
    """A row a case; ``on_row`` gets each as soon as it is there."""
    rows = []
    with _prefill_side() as ask:
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
    with _prefill_side() as ask:
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
    sink = _open_sink(caches, ask)
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
        seconds, result = _hand_over(sink, ticket, case.block_ids)
        num_descriptors = result.num_descriptors
        return seconds

    def hand_over_behind() -> float:
        ticket = ask("grant", case.block_ids)
        return _hand_over_behind(sink, ticket, case.block_ids, case.num_early_blocks)

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


def _open_sink(caches: Caches, ask: Ask) -> TransferSink:
    sink = TransferSink(
        caches,
        incarnation=f"sink-{time.monotonic_ns()}",
        fingerprint="fp",
        on_settled=lambda _request_id: None,
        on_fatal=_fail,
    )
    sink.add_peer("127.0.0.1:1", ask("handshake", sink.handshake_request()))
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


def _hand_over(sink: TransferSink, ticket: Ticket, block_ids: list[int]) -> tuple[float, TransferResult]:
    end = _End()
    sink.read(ticket, block_ids=block_ids, state_slot=1, deadline_s=DEADLINE_S, on_done=end)
    return end.wait()


def _hand_over_behind(sink: TransferSink, ticket: Ticket, block_ids: list[int], num_early: int) -> float:
    """Seconds from when the last part can be read; the others' blocks have landed by then."""
    begun_at = sink.num_parts
    end = _End()
    transfer = sink.begin(
        ticket.request_id, ticket.incarnation, deadline_s=DEADLINE_S, on_done=lambda result: end(result)
    )
    transfer.read_part(Part(block_ids[:num_early], ticket.block_ids[:num_early]))
    while sink.num_parts == begun_at:
        time.sleep(RAW_POLL_S)
    end = _End()
    last = Part(block_ids[num_early:], ticket.block_ids[num_early:], [1], [ticket.state_slot])
    transfer.finish(last, Done(ticket.lease_id, ticket.epoch))
    seconds, _ = end.wait()
    return seconds


class _End:
    """Takes the time from when it is made until it is called, which is on the transfer thread."""

    def __init__(self) -> None:
        self._done: queue.SimpleQueue[tuple[float, TransferResult]] = queue.SimpleQueue()
        self._started = time.perf_counter()

    def __call__(self, result: TransferResult) -> None:
        self._done.put((time.perf_counter() - self._started, result))

    def wait(self) -> tuple[float, TransferResult]:
        seconds, result = self._done.get(timeout=2 * DEADLINE_S)
        if result.error is not None:
            raise result.error
        return seconds, result


def _measure_idle(ask: Ask) -> dict[str, float]:
    """Share of a core with a connected peer and nothing to move."""
    case = ONE_BLOCK
    ask("open", case)
    sink = _open_sink(case.caches(), ask)
    ticket = ask("grant", case.block_ids)
    shares = {"prefill side, one lease held and not read": ask("cpu_share", IDLE_S)}
    ask("end", ticket)
    time.sleep(CONNECT_WINDOW_S)
    shares["prefill side, no lease"] = ask("cpu_share", IDLE_S)
    shares["decode side, no read"] = _cpu_share(IDLE_S)
    sink.close()
    return shares


CONNECT_WINDOW_S = 6.0
"""After a handshake the source polls for a while, so that the peer can connect."""


def _cpu_share(wall_s: float) -> float:
    wall, cpu = time.perf_counter(), time.process_time()
    time.sleep(wall_s)
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


def _fail(error: BaseException) -> None:
    raise error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    _main(parser.parse_args().json)
