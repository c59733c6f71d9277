"""An engine with files behind its host memory, stepped by the test as a server's thread would. It may have
several ranks, of which all but rank 0 run in processes of their own."""

from __future__ import annotations

import queue
import random
import threading
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
from wire.codec import message
from wire.messages.purge import PurgePrefixes
from wire.messages.ranks import RankFileNews
from wire.messages.sampling_params import SamplingParams

BLOCK = 8
DEADLINE_S = 60.0
NUM_TOKENS = 6
FEW = {
    "max_num_seqs": 2,
    "max_batch_tokens": 64,
    "max_model_len": 256,
    "block_size": BLOCK,
    "cached_states": 2,
}
"""Settings of a device that has room for few starts."""


class Filing:
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
        self.fatal: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.ranks: RankProcesses | None = None
        tp = ALONE
        if config.tensor_parallel > 1:
            self.ranks = RankProcesses(
                config,
                work_and_describe,
                files=rank_files,
                reports=(RankFileNews, HostContents),
                on_fatal=self.fatal.put,
            )
            tp = self.ranks.join().tp
        self.files = server_files(files, "test", self.fatal.put, self.ranks)
        self.own = Engine(config, tp, files=self.files)
        self.engine: Any = self.own if self.ranks is None else LeadEngine(self.own, self.ranks.tell)
        self._news = threading.Event()
        self.files.start(self._news.set)

    @property
    def store(self) -> FileStore:
        """The files of rank 0."""
        return self.files._own if isinstance(self.files, FilesOfRanks) else self.files  # type: ignore[return-value]

    @property
    def figures(self) -> Any:
        return self.engine.measures.file_cache

    def step(self) -> list[Any]:
        """Computes a step. If there was nothing to do, waits for news of the files first."""
        self._news.clear()
        result = self.engine.step()
        if result.did_nothing:
            self._news.wait(0.05 if result.wait_s is None else min(0.05, result.wait_s))
        assert self.fatal.empty(), self.fatal.get()
        return list(result.outputs)

    def run(
        self, prompts: Sequence[Sequence[int]], at_once: int = 2, cache_salt: str = "", session: str = ""
    ) -> list[Request]:
        """Returns the requests in order, with their answers."""
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
        requests = [
            Request(str(i), list(one), params, cache_salt=cache_salt, session=session)
            for i, one in enumerate(prompts)
        ]
        waiting, active = list(reversed(requests)), 0
        until = time.monotonic() + DEADLINE_S
        while waiting or active:
            while waiting and active < at_once:
                self.engine.add(waiting.pop())
                active += 1
            for output in self.step():
                assert output.error is None, output.error
                active -= output.finish_reason is not None
            assert time.monotonic() < until, "the requests have not ended"
        return requests

    def settle(self) -> None:
        """Lets all that is in host memory be written."""
        until = time.monotonic() + DEADLINE_S
        while True:
            self.step()
            if not self.own.file_choices.has_work:
                return
            assert time.monotonic() < until, "the files have not settled"

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
