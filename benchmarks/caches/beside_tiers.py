"""What running answers notice of tiers: the time of a token while cached prompts move to host memory, back,
and to files.

    python -m benchmarks.caches.beside_tiers --publish     # four minutes

Eight answers run. Measured is the time of an engine's step, which is the time of a token of each answer, and
the CPU time of the engine's own thread in it.

* **Turns**: beside the answers, 32 conversations take turns as fast as the engine computes them. One engine
  has room for four of them: each turn brings a conversation back from host memory, and another one leaves the
  device and is written to files. The other engine has room for all, and no tiers. Both compute the same rows.
* **Decode steps**: nothing but the answers. In every second run of steps, files are written as fast as they
  may.

The files' thread has the other core. Windows of both sides take turns, and are shorter than the time in which
other guests of the machine come and go: they can slow a core by half for a second. A pair has 32 windows
of each side, with equal work, and its ratio is their median. Two equal engines differ by a percent or two, by
where their memory lies. So turns have two engines a side, which take turns too.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.json_file import write_json
from benchmarks.side_by_side.tables import markdown
from engine.config import EngineConfig
from engine.engine import Engine
from engine.files.start_files import FileJob
from engine.files.tier_settings import FileCache
from engine.models import read_config
from engine.request import Request
from kv_transfer.files.file_store import FileStore
from kv_transfer.files.write_pace import WRITE_BYTES_PER_S
from testing.marked_section import replace_between
from twinfang.bench.machine import machine
from twinfang.flags.table import BUNDLED_MODEL
from wire.messages.sampling_params import SamplingParams

NUM_ROWS, NUM_PAIRS, WINDOWS_EACH = 8, 10, 32
NUM_SESSIONS, NUM_TURNS, ROOM_FOR_SESSIONS = 32, 12, 4
FIRST_PROMPT, TURN_TOKENS = 400, 160
STATES_EACH = 3
TURNS_EACH, STEPS_EACH = 8, 80
"""Turns, or decode steps, of a window: an eighth of a second."""
HOST_BYTES = 96 << 20
"""Room for the conversations, and for few that have ended."""
WARM_TURNS = 20 * NUM_SESSIONS
"""Then host memory is full, whose first use costs more: the system clears its pages. And cache policies have
learned from ended conversations: before that, the engine with room for all computes some prompts again."""
MOST_TOKENS = FIRST_PROMPT + NUM_TURNS * TURN_TOKENS
WRITE_PAGES = 64
FIRST_TOKEN_ID, LAST_TOKEN_ID = 5, 900
CORES = sorted(os.sched_getaffinity(0))
OWN_CORE, OTHER_CORES = {CORES[0]}, set(CORES[1:] or CORES)
"""Of the engine's thread, and of the files' thread."""
PUBLISHED, DOCUMENT = Path("benchmarks/results/beside_tiers.json"), Path("docs/cache-tiers.md")
BEGIN = "<!-- written by: python -m benchmarks.caches.beside_tiers --publish -->"
END = "<!-- end of what running answers notice -->"


@dataclass(frozen=True)
class Window:
    """The cost of a window, in milliseconds a step."""

    step_ms: float
    engine_cpu_ms: float
    num_steps: int


class Side:
    """An engine with eight running answers, and its files if it has any."""

    def __init__(
        self, model: Path, *, num_sessions: int, host_bytes: int = 0, files: FileCache | None = None
    ) -> None:
        config = EngineConfig(
            model,
            "both",
            device="cpu",
            max_num_seqs=NUM_ROWS + num_sessions,
            max_model_len=MOST_TOKENS,
            cached_states=STATES_EACH * num_sessions,
            num_threads=1,
            stream_interval_s=0.0,  # steps are measured, not bursts
            host_cache_bytes=host_bytes,
            file_cache=files,
        )
        demand = config.demand(read_config(model))
        most_bytes = demand.slots_bytes + demand.max_blocks * demand.block_bytes
        self.store = None if files is None else FileStore(files, "benchmark", _fail)
        self.engine = Engine(replace(config, cache_memory_bytes=most_bytes), files=self.store)
        if self.store is not None:
            with on_cores(OTHER_CORES):
                self.store.start(lambda: None)
        self._num_requests = 0
        self._rows: list[str] = []
        for row in range(NUM_ROWS):
            self._begin(row)

    def _begin(self, row: int) -> None:
        """Begins an answer that takes long."""
        prompt = [FIRST_TOKEN_ID + row] * 32
        name = self._add(prompt, MOST_TOKENS - len(prompt) - 1)
        self._rows[row : row + 1] = [name]

    def _add(self, prompt: Sequence[int], max_tokens: int) -> str:
        name = str(self._num_requests)
        self._num_requests += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self.engine.add(Request(name, list(prompt), params))
        return name

    def turns(self, prompts: Sequence[Sequence[int]]) -> Window:
        """Computes these prompts one after the other, beside the answers."""
        num_steps, start, start_cpu = 0, time.perf_counter(), time.thread_time()
        for prompt in prompts:
            name, is_answered = self._add(prompt, 1), False
            while not is_answered:
                num_steps += 1
                is_answered = name in self.step()
        return _window(start, start_cpu, num_steps)

    def step(self) -> set[str]:
        """Computes a step; returns the requests that have ended. An answer that has ended begins again."""
        ended = {one.request_id for one in self.engine.step().outputs if one.finish_reason is not None}
        for name in ended.intersection(self._rows):
            self._begin(self._rows.index(name))
        return ended

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


def _window(start: float, start_cpu: float, num_steps: int) -> Window:
    spent_ms = (time.perf_counter() - start) * 1000
    return Window(spent_ms / num_steps, (time.thread_time() - start_cpu) * 1000 / num_steps, num_steps)


def _fail(error: BaseException) -> None:
    raise error


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Lets this thread, and those that it starts, use only these cores inside the block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def conversations(seed: int) -> Iterator[list[int]]:
    """Yields the prompts of conversations that take turns in random order. One that has had all its turns is
    replaced by a new one. At first they are of all lengths."""
    choose = random.Random(seed)

    def new_tokens(count: int) -> list[int]:
        return [choose.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(count)]

    sessions = [new_tokens(FIRST_PROMPT + index % NUM_TURNS * TURN_TOKENS) for index in range(NUM_SESSIONS)]
    while True:
        order = list(range(NUM_SESSIONS))
        choose.shuffle(order)
        for index in order:
            yield list(sessions[index])
            if len(sessions[index]) + TURN_TOKENS >= MOST_TOKENS:
                sessions[index] = new_tokens(FIRST_PROMPT)
            else:
                sessions[index] += new_tokens(TURN_TOKENS)


def beside_turns(model: Path, directory: Path, seed: int) -> dict[str, Any]:
    """Returns what turns cost with tiers and without."""
    plain = [Side(model, num_sessions=NUM_SESSIONS)]
    tiered = [
        Side(
            model,
            num_sessions=ROOM_FOR_SESSIONS,
            host_bytes=HOST_BYTES,
            files=FileCache(directory / str(number), 4 << 30),
        )
        for number in range(2)
    ]
    plain.append(Side(model, num_sessions=NUM_SESSIONS))
    sides = {"without": plain, "with": tiered}
    prompts = conversations(seed)
    work = [next(prompts) for _ in range(WARM_TURNS)]
    for side in (*plain, *tiered):
        side.turns(work)
    before = _moved(tiered)
    windows: dict[str, list[Window]] = {name: [] for name in sides}
    spent_s = 0.0
    for window in range(NUM_PAIRS * WINDOWS_EACH // 2):
        work = [next(prompts) for _ in range(TURNS_EACH)]
        names = list(sides)
        for number in range(2):
            for name in names if window % 2 else reversed(names):
                start = time.perf_counter()
                windows[name].append(sides[name][number].turns(work))
                spent_s += (time.perf_counter() - start) * (name == "with")
    rates = {name: (after - before[name]) / spent_s for name, after in _moved(tiered).items()}
    for side in (*plain, *tiered):
        side.close()
    return _row(windows) | {
        "turns_per_s": NUM_PAIRS * WINDOWS_EACH * TURNS_EACH / spent_s,
        "promoted_per_s": rates["promoted"],
        "demoted_per_s": rates["demoted"],
        "written_mb_per_s": rates["written_bytes"] / 1e6,
    }


def _moved(sides: Sequence[Side]) -> dict[str, int]:
    """Returns what the engines have moved between their tiers until now."""
    measures = [side.engine.measures for side in sides]
    return {
        "promoted": sum(one.host_cache.promoted for one in measures),
        "demoted": sum(one.host_cache.demoted for one in measures),
        "written_bytes": sum(one.file_cache.written_bytes for one in measures),
    }


def beside_writes(model: Path, directory: Path, seed: int) -> dict[str, Any]:
    """Returns what decode steps cost while files are written at full rate, and while they are not."""
    side = Side(
        model,
        num_sessions=ROOM_FOR_SESSIONS,
        host_bytes=64 << 20,
        files=FileCache(directory, 1 << 30),
    )
    assert side.store is not None
    memory = side.engine.host_pages.memory
    memory[:] = seed
    for _ in range(WINDOWS_EACH * STEPS_EACH):
        side.step()
    windows: dict[str, list[Window]] = {"without": [], "with": []}
    before, spent_s = side.store.figures.written_bytes, 0.0
    for window in range(NUM_PAIRS * WINDOWS_EACH):
        names = list(windows)
        for name in names if window % 2 else reversed(names):
            while not side.store.may_write:  # what the last window has asked for is still being written
                time.sleep(0.01)
            start, start_cpu = time.perf_counter(), time.thread_time()
            for _ in range(STEPS_EACH):
                if name == "with" and side.store.may_write:
                    _write(side.store, memory)
                side.store.landed()
                side.step()
            windows[name].append(_window(start, start_cpu, STEPS_EACH))
            spent_s += (time.perf_counter() - start) * (name == "with")
    written = side.store.figures.written_bytes - before
    side.close()
    return _row(windows) | {"written_mb_per_s": written / spent_s / 1e6}


def _write(store: FileStore, memory: object) -> None:
    """Asks for a start of random keys to be written."""
    keys = tuple(os.urandom(16) for _ in range(WRITE_PAGES))
    pages, state = tuple(range(1, WRITE_PAGES + 1)), (1,) * store._form.state_pages
    store.write(FileJob(keys, b"", WRITE_PAGES, pages, state), memory, lambda: None)  # type: ignore[arg-type]


def _row(windows: dict[str, list[Window]]) -> dict[str, Any]:
    both = list(zip(windows["without"], windows["with"], strict=True))
    ratios = [tiered.step_ms / plain.step_ms for plain, tiered in both]
    starts = range(0, len(ratios), WINDOWS_EACH)
    of_pairs = [statistics.median(ratios[start : start + WINDOWS_EACH]) for start in starts]
    cpu_ratios = [tiered.engine_cpu_ms / plain.engine_cpu_ms for plain, tiered in both]
    return {
        "token_ms": {name: statistics.median(one.step_ms for one in ones) for name, ones in windows.items()},
        "engine_cpu_ms": {
            name: statistics.median(one.engine_cpu_ms for one in ones) for name, ones in windows.items()
        },
        "steps": {name: sum(one.num_steps for one in ones) for name, ones in windows.items()},
        "ratio": statistics.median(ratios),
        "ratios_of_pairs": [round(ratio, 4) for ratio in sorted(of_pairs)],
        "cpu_ratio": statistics.median(cpu_ratios),
    }


def section(figures: dict[str, Any]) -> str:
    """Returns the table of docs/cache-tiers.md."""
    head = ("ms", "a token, without", "a token, with", "ratio", "engine's CPU, without", "with", "ratio")
    lines = []
    for name, title in (("turns", "beside turns of conversations"), ("decode", "beside nothing else")):
        row = figures[name]
        times = [f"{row['token_ms'][side]:.3f}" for side in ("without", "with")]
        cpu = [f"{row['engine_cpu_ms'][side]:.3f}" for side in ("without", "with")]
        spread = f"{row['ratio']:.3f} ({row['ratios_of_pairs'][0]:.3f} to {row['ratios_of_pairs'][-1]:.3f})"
        lines.append([title, *times, spread, *cpu, f"{row['cpu_ratio']:.3f}"])
    turns, machine_ = figures["turns"], figures["machine"]
    return (
        f"{markdown(head, lines)}\n\nMedians of {NUM_PAIRS} pairs; a ratio is the median of the pairs' "
        "own ones, with the least and greatest. A second had "
        f"{turns['turns_per_s']:.0f} turns, {turns['promoted_per_s']:.0f} prompts back from host memory, "
        f"{turns['demoted_per_s']:.0f} to it, and {turns['written_mb_per_s']:.1f} MB into files; beside "
        f"nothing else, {figures['decode']['written_mb_per_s']:.1f} MB into files. {machine_['processor']}, "
        f"{machine_['cores']} cores, load {machine_['load_average']:.1f} before the run."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--publish", action="store_true", help="figures into the repository")
    options = parser.parse_args()
    before = machine()
    gc.freeze()  # as servers do: the collector looks at nothing that imports have made
    figures: dict[str, Any] = {"write_limit_mb_per_s": WRITE_BYTES_PER_S / 1e6}
    with (
        tempfile.TemporaryDirectory(prefix="beside-tiers-") as folder,
        on_cores(OWN_CORE),
    ):
        for name, measure in (("turns", beside_turns), ("decode", beside_writes)):
            figures[name] = measure(options.model, Path(folder) / name, options.seed)
            print(name, figures[name], flush=True)
    figures = {"machine": before, **figures}
    if options.json:
        write_json(options.json, figures)
    if options.publish:
        write_json(PUBLISHED, figures)
        replace_between(DOCUMENT, BEGIN, END, section(figures))


if __name__ == "__main__":
    main()
