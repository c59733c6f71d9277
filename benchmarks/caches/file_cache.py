"""Prompts that only files have, and answers that run while files are written.

    python -m benchmarks.caches.file_cache --json benchmarks/results/file_cache.json

* **Restart**: sessions of several lengths are computed, written to files, and asked for again by a new engine
  with the same directory. Measured is the time from a prompt to its first token, beside an engine without a
  cache, prompt by prompt in turn.
* **Writes**: an engine decodes eight answers. In every second run of steps, its files' thread writes as
  fast as it may. Measured is the time of a step, and the engine's own CPU time in it.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.json_file import write_json
from engine.config import EngineConfig
from engine.engine import Engine
from engine.files.start_files import FileJob
from engine.files.tier_settings import FileCache
from engine.models import read_config
from engine.request import Request
from kv_transfer.files.file_store import FileStore
from twinfang.bench.machine import machine
from twinfang.flags.table import BUNDLED_MODEL
from wire.messages.sampling_params import SamplingParams

LENGTHS, NUM_SESSIONS = (256, 512, 1024, 2048), 8
NUM_PAIRS, STEPS_EACH, NUM_ROWS = 10, 80, 8
WRITE_PAGES = 64
FIRST_TOKEN_ID, LAST_TOKEN_ID = 5, 900


class Run:
    """An engine and its files, stepped as a server's thread would."""

    def __init__(self, model_dir: Path, files: FileCache | None, **settings: object) -> None:
        config = EngineConfig(
            model_dir,
            "both",
            device="cpu",
            max_num_seqs=NUM_ROWS,
            max_model_len=max(LENGTHS) + 16 + NUM_PAIRS * 2 * STEPS_EACH,
            num_threads=1,
            stream_interval_s=0.0,
            file_cache=files,
            **settings,  # type: ignore[arg-type]
        )
        demand = config.demand(read_config(model_dir))
        most_bytes = demand.slots_bytes + demand.max_blocks * demand.block_bytes
        self.store = None if files is None else FileStore(files, "benchmark", _fail)
        self.engine = Engine(replace(config, cache_memory_bytes=most_bytes), files=self.store)
        self.news = threading.Event()
        if self.store is not None:
            self.store.start(self.news.set)

    def step(self) -> list[object]:
        self.news.clear()
        result = self.engine.step()
        if result.did_nothing:
            self.news.wait(0.01 if result.wait_s is None else min(0.01, result.wait_s))
        return list(result.outputs)

    def first_token(self, prompt: list[int], name: str) -> tuple[float, int, int]:
        """Return milliseconds until the first token, the token, and the number of cached tokens."""
        request = Request(name, list(prompt), SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
        start = time.perf_counter()
        self.engine.add(request)
        while not self.step():
            pass
        return (time.perf_counter() - start) * 1000, request.tokens[-1], request.measured.num_cached

    def settle(self) -> None:
        """Give up what the device has, and let all of host memory be written."""
        cache = self.engine.scheduler.owned.cache
        while cache.num_cached_states:
            cache._evict_for_slot()
        self.engine.step()
        while self.engine.file_choices.has_work:
            self.step()

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


def _fail(error: BaseException) -> None:
    raise error


def restart(model_dir: Path, directory: Path, seed: int) -> list[dict[str, object]]:
    """Return a row for each length of prompts."""
    choose = random.Random(seed)
    prompts = {
        length: [
            [choose.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(length)]
            for _ in range(NUM_SESSIONS)
        ]
        for length in LENGTHS
    }
    files = FileCache(directory, 8 << 30)
    settings = {"host_cache_bytes": 1 << 30, "cached_states": 8}
    first = Run(model_dir, files, **settings)
    for length, ones in prompts.items():
        for index, prompt in enumerate(ones):
            first.first_token(prompt, f"{length}-{index}")
            first.settle()
    first.close()
    plain, again = Run(model_dir, None, cache_mode="none"), Run(model_dir, files, **settings)
    warm = [choose.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(1024)]
    plain.first_token(warm, "warm")
    again.first_token(warm, "warm")
    rows: list[dict[str, object]] = []
    for length, ones in prompts.items():
        times: dict[str, list[float]] = {"computed": [], "from files": []}
        cached = 0
        for index, prompt in enumerate(ones):
            computed_ms, token, _ = plain.first_token(prompt, f"{length}-{index}")
            read_ms, same, num_cached = again.first_token(prompt, f"{length}-{index}")
            assert token == same, "the engines say different things"
            cached += num_cached
            times["computed"].append(computed_ms)
            times["from files"].append(read_ms)
        medians = {name: statistics.median(ones_ms) for name, ones_ms in times.items()}
        rows.append({"prompt_tokens": length, "cached_tokens": cached / NUM_SESSIONS, **medians})
        print(rows[-1], flush=True)
    print(again.engine.measures.file_cache, flush=True)
    again.close()
    return rows


def writes(model_dir: Path, directory: Path, seed: int) -> dict[str, object]:
    """Return the time of decode steps, with writes and without, as medians of each pair's run."""
    choose = random.Random(seed)
    run = Run(model_dir, FileCache(directory, 1 << 30), host_cache_bytes=64 << 20)
    assert run.store is not None
    store, pages = run.store, run.engine._store._pages
    memory = pages.memory
    memory[:] = 7
    params = SamplingParams(max_tokens=NUM_PAIRS * 2 * STEPS_EACH + 8, temperature=0, ignore_eos=True)
    for row in range(NUM_ROWS):
        prompt = [choose.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(64)]
        run.engine.add(Request(f"row {row}", prompt, params))
    for _ in range(16):
        run.engine.step()
    found: dict[str, list[tuple[float, float]]] = {"quiet": [], "writing": []}
    before, wrote_s = store.figures.written_bytes, 0.0
    for _ in range(NUM_PAIRS):
        for name in ("quiet", "writing"):
            spent: list[float] = []
            start, start_cpu = time.perf_counter(), time.thread_time()
            for _ in range(STEPS_EACH):
                began = time.perf_counter()
                if name == "writing" and store.may_write:
                    keys = tuple(os.urandom(16) for _ in range(WRITE_PAGES))
                    store.write(
                        FileJob(
                            keys,
                            b"",
                            WRITE_PAGES,
                            tuple(range(1, WRITE_PAGES + 1)),
                            (1,) * store._form.state_pages,
                        ),
                        *(memory, lambda: None),
                    )
                run.engine.step()
                spent.append(time.perf_counter() - began)
            cpu_ms = (time.thread_time() - start_cpu) * 1000 / STEPS_EACH
            found[name].append((statistics.median(spent) * 1000, cpu_ms))
            wrote_s += (time.perf_counter() - start) * (name == "writing")
    written = store.figures.written_bytes - before
    run.close()
    ratios = [writing[0] / quiet[0] for quiet, writing in zip(found["quiet"], found["writing"], strict=True)]
    row = {
        "step_ms": {name: statistics.median(ms for ms, _ in ones) for name, ones in found.items()},
        "engine_cpu_ms": {name: statistics.median(cpu for _, cpu in ones) for name, ones in found.items()},
        "ratio_of_pairs": statistics.median(ratios),
        "written_mb_per_s": written / wrote_s / 1e6,
    }
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = {
            "restart": restart(options.model, Path(folder) / "restart", options.seed),
            "writes": writes(options.model, Path(folder) / "writes", options.seed),
        }
    if options.json:
        write_json(options.json, {"machine": machine(), **figures})


if __name__ == "__main__":
    main()
