"""An engine with files behind its host memory, stepped by the test as a server's thread would. It may have
several ranks, of which all but rank 0 run in processes of their own."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.files.start_files import PurgedFiles
from engine.files.tier_settings import FileCache
from engine.group.rank_link import RankLink
from engine.models import read_config
from engine.parallel.tensor_parallel import ALONE, TensorParallel
from engine.ranks.lead import LeadEngine
from engine.ranks.process import work
from engine.ranks.processes import RankProcesses
from engine.request import Request
from kv_transfer.files.file_store import FileStore
from kv_transfer.ranks.files_of_ranks import FilesOfRanks, server_files
from kv_transfer.ranks.rank_files import rank_files
from testing.kv_transfer.stepped_server import DEADLINE_S, Fatal, SteppedServer
from wire.codec import message
from wire.messages.purge import PurgePrefixes
from wire.messages.ranks import RankFileNews
from wire.messages.sampling_params import SamplingParams

BLOCK = 8
NUM_TOKENS = 6
FEW = {
    "max_num_seqs": 2,
    "max_batch_tokens": 64,
    "max_model_len": 256,
    "block_size": BLOCK,
    "cached_states": 2,
}
"""Settings of a device that has room for few starts."""


class Filing(SteppedServer):
    """The engine, its files, and what has happened to both."""

    def __init__(self, model_dir: Path, files: FileCache | None, **settings: Any) -> None:
        settings = {**FEW, "cache_mode": "all", "host_cache_bytes": 64 << 20, "sanitize": True, **settings}
        if settings.get("tensor_parallel", 1) > 1:
            settings["num_threads"] = 1
        if settings["cache_mode"] == "none":
            settings |= {"host_cache_bytes": 0, "cached_states": None}
        config = EngineConfig(model_dir, "both", device="cpu", file_cache=files, **settings)
        least = config.demand(read_config(model_dir), TensorParallel(0, config.tensor_parallel)).min_bytes
        config = replace(config, **{"cache_memory_bytes": least, **settings})
        fatal: Fatal = queue.SimpleQueue()
        self.ranks: RankProcesses | None = None
        tp = ALONE
        if config.tensor_parallel > 1:
            self.ranks = RankProcesses(
                config,
                work_and_describe,
                files=rank_files,
                reports=(RankFileNews, HostContents),
                on_fatal=fatal.put,
            )
            tp = self.ranks.join().tp
        own_files = server_files(files, "test", fatal.put, self.ranks)
        engine = Engine(config, tp, files=own_files)
        lead = engine if self.ranks is None else LeadEngine(engine, self.ranks.tell)
        super().__init__(lead, own_files, fatal)

    @property
    def store(self) -> FileStore:
        """The files of rank 0."""
        return self.files._own if isinstance(self.files, FilesOfRanks) else self.files  # type: ignore[return-value]

    @property
    def figures(self) -> Any:
        return self.engine.measures.file_cache

    def run(
        self, prompts: Sequence[Sequence[int]], at_once: int = 2, cache_salt: str = "", session: str = ""
    ) -> list[Request]:
        """Returns the requests in order, with their answers."""
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
        requests = [
            Request(str(i), list(one), params, cache_salt=cache_salt, session=session)
            for i, one in enumerate(prompts)
        ]
        self.serve(requests, at_once)
        return requests

    def purge(self, wanted: PurgePrefixes) -> tuple[int, PurgedFiles]:
        """Deletes cached prompts as a server does. Returns how many starts went from memory, and what went
        from files."""
        return self.purge_with(wanted, lambda: None)

    def purge_with(self, wanted: PurgePrefixes, meanwhile: Callable[[], None]) -> tuple[int, PurgedFiles]:
        """Does the same, and ``meanwhile`` when files have been asked."""
        purges, done = self.engine.purges, queue.SimpleQueue[PurgedFiles]()
        num_starts = purges.purge(wanted)
        self.files.purge(wanted, done.put)
        meanwhile()
        purged = done.get(timeout=DEADLINE_S)
        until = time.monotonic() + DEADLINE_S
        while purges.under_way(wanted):
            self.step()
            assert time.monotonic() < until, "what was under way has not ended"
        return num_starts + purges.purge(wanted), purged

    def check_ranks_agree(self) -> None:
        """Compares what host memory holds, page by page, on all ranks."""
        if self.ranks is None:
            return
        told: queue.SimpleQueue[tuple[int, HostContents]] = queue.SimpleQueue()
        self.ranks.listen(lambda rank, contents: told.put((rank, contents)), HostContents)
        self.ranks.tell(DescribeHost())
        expected = host_contents(self.own)
        for _ in range(self.ranks.size - 1):
            rank, contents = told.get(timeout=DEADLINE_S)
            assert contents == expected, f"host memory of rank {rank} differs"

    def close(self) -> None:
        self.files.close()
        self.engine.grammars.close()
        if self.ranks is not None:
            self.ranks.stop()


@message
class DescribeHost:
    """Asks a rank what its host memory holds."""


@message
class HostContents:
    """The starts in host memory, those used least recently first, and the page of each block."""

    starts: tuple[tuple[bytes, tuple[int, ...]], ...]
    pages: dict[str, int]
    num_free: int


def host_contents(engine: Engine) -> HostContents:
    tier = engine.scheduler.owned.cache.tier
    return HostContents(
        tuple((start.key, start.state_pages) for start in tier._starts),
        {key.hex(): block.page for key, block in tier._blocks.items()},
        tier._pages.num_free,
    )


def work_and_describe(engine: Engine, link: RankLink) -> None:
    """Runs a rank other than 0. It also says what its host memory holds."""
    link.takers[DescribeHost] = lambda _: link.send(host_contents(engine))
    work(engine, link)


@contextmanager
def filing(model_dir: Path, files: FileCache | None, **settings: Any) -> Iterator[Filing]:
    made = Filing(model_dir, files, **settings)
    try:
        yield made
    finally:
        made.close()


def answers(requests: Sequence[Request]) -> list[list[int]]:
    return [request.tokens[request.num_prompt :] for request in requests]


def num_cached(requests: Sequence[Request]) -> int:
    return sum(request.measured.num_cached for request in requests)


def conversations(num_sessions: int, num_turns: int, seed: int = 0) -> list[list[int]]:
    """Returns prompts, turn by turn: each continues the last one of its session."""
    choose = random.Random(seed)

    def new_tokens(least: int, most: int) -> list[int]:
        return [choose.randrange(6, 150) for _ in range(choose.randint(least, most))]

    sessions = [new_tokens(60, 100) for _ in range(num_sessions)]
    prompts: list[list[int]] = []
    for _ in range(num_turns):
        for session in sessions:
            prompts.append(list(session))
            session += new_tokens(5, 30)
    return prompts
