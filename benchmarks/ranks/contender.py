"""An engine of one or several tensor-parallel ranks in processes of their own, which runs steps on request.

    python -m benchmarks.ranks.contender MODEL_DIR NUM_RANKS CORE…

Every rank has one thread, and a core of its own. Each line of standard input is a JSON request; each gets a
line of JSON in answer:

| request | answer |
|---|---|
| ``["decode", rows, steps]`` | ``steps``: seconds of each; ``waits``: seconds that each rank waited |
| ``["prompt", tokens, runs]`` | the same for prompts of that length, one by one |
| ``["sum", rows, runs]`` | ``steps``: seconds of each sum of ``[rows, hidden]`` by itself |

A rank waits while the others are behind, and while their parts are on the way; ``sum`` shows the latter,
since there the ranks have nothing else to do. Ranks that exchange messages do not count their waits. For
those, ``waits`` is the time that rank 0 was in collectives.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.parallel.tensor_parallel import TensorParallel
from engine.ranks.lead import LeadEngine
from engine.ranks.process import RankLink, RankWorker
from engine.ranks.processes import RankProcesses
from engine.request import Request
from wire.messages.sampling_params import SamplingParams

CONTEXT = 128
MAX_MODEL_LEN = 2048
SUMS = {1: 400, 8: 400, 32: 400, 512: 40}
"""Number of sums by themselves, by rows. They are made once, before anything else."""


class CollectiveClock:
    """Adds up the seconds that this process is in collectives called from Python."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("sum", "gather_columns"):
            setattr(TensorParallel, name, self._timed(getattr(TensorParallel, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def time_sums(tp: TensorParallel, hidden_size: int) -> dict[int, list[float]]:
    """Makes sums with nothing else between them; every rank calls this at the same time."""
    found: dict[int, list[float]] = {}
    for rows, runs in SUMS.items():
        x = torch.zeros(rows, hidden_size)
        found[rows] = []
        for _ in range(runs):
            began = time.perf_counter()
            tp.sum(x)
            found[rows].append(time.perf_counter() - began)
    return found


@torch.inference_mode()
def work_after_sums(engine: Engine, link: RankLink) -> None:
    """A rank's main function."""
    time_sums(engine.tp, engine.model.config.hidden_size)
    RankWorker(engine, link).run()


class Contender:
    """The engine, and the requests that it answers."""

    def __init__(self, engine: Any, own: Engine) -> None:
        self._engine = engine
        self._own = own
        self._clock = CollectiveClock()
        self._num_added = 0
        self._sums = time_sums(own.tp, own.model.config.hidden_size) if own.tp.size > 1 else {}

    def answer(self, request: list[Any]) -> dict[str, Any]:
        name, *sizes = request
        return {"decode": self._decode, "prompt": self._prompt, "sum": self._sum}[name](*sizes)

    def _decode(self, rows: int, steps: int) -> dict[str, Any]:
        names = [self._add(CONTEXT, MAX_MODEL_LEN - CONTEXT) for _ in range(rows)]
        begun: set[str] = set()
        while len(begun) < rows:
            begun |= {output.request_id for output in self._engine.step().outputs}
        for _ in range(3):
            self._engine.step()
        found = self._timed(self._engine.step, steps)
        for name in names:
            self._engine.cancel(name)
        while not self._engine.step().did_nothing:
            pass
        return found

    def _prompt(self, tokens: int, runs: int) -> dict[str, Any]:
        def run() -> None:
            self._add(tokens, 1)
            while not self._engine.step().outputs:
                pass

        found = self._timed(run, runs)
        while not self._engine.step().did_nothing:
            pass
        return found

    def _sum(self, rows: int, _: int) -> dict[str, Any]:
        return {"steps": self._sums[rows], "waits": []}

    def _timed(self, run: Callable[[], Any], times: int) -> dict[str, Any]:
        found = []
        before = self._waits_s()
        for _ in range(times):
            began = time.perf_counter()
            run()
            found.append(time.perf_counter() - began)
        waits = [after - earlier for after, earlier in zip(self._waits_s(), before, strict=True)]
        return {"steps": found, "waits": waits}

    def _waits_s(self) -> list[float]:
        tp = self._own.tp
        memory = getattr(getattr(tp, "transport", None), "memory", None)
        return [self._clock.seconds] if memory is None else [memory.waited_s(rank) for rank in range(tp.size)]

    def _add(self, length: int, max_tokens: int) -> str:
        self._num_added += 1
        generator = torch.Generator().manual_seed(self._num_added)
        tokens = torch.randint(500, (length,), generator=generator) + 5
        name = str(self._num_added)
        self._engine.add(Request(name, tokens.tolist(), SamplingParams(max_tokens=max_tokens, temperature=0)))
        return name


def bind(pid: int, core: int) -> None:
    """Binds all threads of a process to one core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


@contextmanager
def engine_of(model_dir: Path, num_ranks: int, cores: list[int]) -> Any:
    """Yields the engine to call, and this process's own engine."""
    config = EngineConfig(
        model_dir,
        "both",
        device="cpu",
        tensor_parallel=num_ranks,
        num_threads=1,
        stream_interval_s=0.0,
        max_num_seqs=32,
        max_model_len=MAX_MODEL_LEN,
        cache_mode="none",
        cache_memory_bytes=1 << 30,
    )
    if num_ranks == 1:
        bind(os.getpid(), cores[0])
        engine = Engine(config)
        yield engine, engine
        return
    ranks = RankProcesses(config, work_after_sums, on_fatal=lambda error: os._exit(1))
    own = Engine(config, ranks.join().tp)
    for pid, core in zip([os.getpid(), *ranks.pids], cores, strict=True):
        bind(pid, core)
    yield LeadEngine(own, ranks.tell), own
    ranks.stop()


@torch.inference_mode()
def main() -> None:
    model_dir, num_ranks, *cores = sys.argv[1:]
    with engine_of(Path(model_dir), int(num_ranks), [int(core) for core in cores]) as (engine, own):
        contender = Contender(engine, own)
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            print(json.dumps(contender.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
