"""Runs one cell of the grid, and compares its tokens with those of the reference."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.parallel.tensor_parallel import ALONE
from engine.ranks.lead import LeadEngine
from engine.ranks.process import work
from engine.ranks.processes import RankProcesses
from engine.request import Request
from kv_transfer.ranks.files_of_ranks import server_files
from kv_transfer.ranks.rank_files import rank_files
from testing.engines.leading import own
from testing.kv_transfer.stepped_server import Fatal, SteppedServer
from testing.lives.file_side import reservations, writing
from testing.tiers.cell import FEW, Cell
from wire.messages.ranks import RankFileNews
from wire.messages.sampling_params import SamplingParams

NUM_TOKENS = 6


@dataclass
class Outcome:
    """What a cell has shown."""

    prompts: int = 0
    tokens: int = 0
    """Tokens that were compared."""
    mismatches: int = 0
    """Prompts whose answers have other tokens than the reference's."""
    prompt_tokens: int = 0
    cached_tokens: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0, "files": 0})
    """Tokens of prompts that were not computed, by the tier that had them."""
    moved: dict[str, int] = field(default_factory=dict)
    """Starts that were demoted, promoted, written and read."""
    drafts: dict[str, int] = field(default_factory=lambda: {"tried": 0, "accepted": 0})
    preemptions: int = 0
    seconds: float = 0.0

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


class Server(SteppedServer):
    """An engine of one or more ranks and its files."""

    def run(self, prompts: Sequence[Sequence[int]], at_once: int) -> list[Request]:
        """Returns the requests in order, with their answers."""
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        requests = [Request(str(i), list(one), params) for i, one in enumerate(prompts)]
        self.serve(requests, at_once)
        return requests


@contextmanager
def serving(config: EngineConfig) -> Iterator[Server]:
    """Starts a server whose files, if it has any, are as the last one has left them."""
    fatal: Fatal = queue.SimpleQueue()
    ranks = None
    if config.tensor_parallel > 1:
        reports = (RankFileNews,)
        ranks = RankProcesses(config, work, files=rank_files, reports=reports, on_fatal=fatal.put)
    tp = ALONE if ranks is None else ranks.join().tp
    files = server_files(config.file_cache, "grid", fatal.put, ranks)
    engine: Engine | LeadEngine
    try:
        if ranks is None:
            engine = Engine(config, files=files)
        else:
            engine = LeadEngine(Engine(config, tp, files=files), ranks.tell)
        yield Server(engine, files, fatal)
        own(engine).grammars.close()
    finally:
        files.close()
        if ranks is not None:
            ranks.stop()
    assert fatal.empty(), fatal.get()


def answers(requests: Sequence[Request]) -> list[list[int]]:
    return [request.tokens[request.num_prompt :] for request in requests]


def expected_answers(
    cell: Cell, model_dir: Path, directory: Path, prompts: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Returns the answers of the reference: one prompt at a time, no cache, no drafts."""
    with serving(cell.reference.config(model_dir, directory, sanitize=False)) as server:
        return answers(server.run(prompts, at_once=1))


def try_cell(
    cell: Cell,
    model_dir: Path,
    directory: Path,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
) -> Outcome:
    """Runs all prompts, several at a time. A cell ``restart`` finds the files of the cell ``files``."""
    outcome = Outcome(prompts=len(prompts), prompt_tokens=sum(len(one) for one in prompts))
    began_s = time.monotonic()
    with serving(cell.config(model_dir, directory)) as server:
        requests = server.run(prompts, at_once=FEW["max_num_seqs"])
        server.settle()
        _count(outcome, server, requests)
        check_nothing_is_owned(server)
    for found, right in zip(answers(requests), expected, strict=True):
        outcome.tokens += len(right)
        outcome.mismatches += found != list(right)
    outcome.seconds = round(time.monotonic() - began_s, 2)
    return outcome


def check_nothing_is_owned(server: Server) -> None:
    owned = own(server.engine).scheduler.owned
    assert owned.cache.num_available_blocks == owned.blocks.capacity
    assert owned.cache.num_available_slots == owned.slots.capacity
    assert not reservations(owned)
    assert writing(owned) is None


def _count(outcome: Outcome, server: Server, requests: Sequence[Request]) -> None:
    engine = own(server.engine)
    for request in requests:
        measured = request.measured
        from_files = min(measured.num_promoted, _num_read(request))
        outcome.cached_tokens["device"] += measured.num_cached - measured.num_promoted
        outcome.cached_tokens["host"] += measured.num_promoted - from_files
        outcome.cached_tokens["files"] += from_files
        outcome.drafts["tried"] += measured.num_drafted
        outcome.drafts["accepted"] += measured.num_accepted
    host, files = engine.measures.host_cache, engine.measures.file_cache
    outcome.moved = {"demoted": host.demoted, "promoted": host.promoted}
    outcome.moved |= {"written": files.written, "read": files.read}
    outcome.preemptions = engine.scheduler.num_preemptions
    assert not any(files.failures.values()), files.failures


def _num_read(request: Request) -> int:
    """Returns the tokens of the start that were read from files for this request, if it began there."""
    fetch = request.fetch
    if fetch is None or fetch.job.num_blocks * FEW["block_size"] != request.measured.num_cached:
        return 0
    return max(1, len(fetch.job.keys)) * FEW["block_size"]
