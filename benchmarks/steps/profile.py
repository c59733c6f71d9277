"""The time of one engine step by kernel, compared with the machine's limits.

    python -m benchmarks.steps.profile [--models 2m 120m bundled] [--steps prefill-256 decode-8] [--threads 1]
                                      [--rounds 15] [--json FILE] [--folder FOLDER]

A step is timed as a whole, and again with a clock on every operator: a row's time is the operator's time
without the operators inside it. A round has a large GEMM, a whole step, and a step with clocks, in turn.
Figures are medians over the rounds: CPU time on one thread, wall time on more. The limits are the step's
floating-point operations at the rate of that GEMM, and its weights at the rate of a long sum.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.steps.profile_clock import Item, StepClock, clocks
from benchmarks.steps.work import read_weight_bytes, step_flops
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from testing.checkpoints.random_model import MODELS, checkpoint
from twinfang.bench.machine import machine
from twinfang.flags.table import BUNDLED_MODEL
from wire.messages.sampling_params import SamplingParams

BUNDLED = "bundled"
MAX_MODEL_LEN = 8192
DECODE_STEPS = 32
"""Decode steps for which a batch is used before another replaces it."""
FIRST_TOKEN_ID, NUM_TOKEN_IDS = 5, 500
GEMM_SIZE = 1024

HOST = "host: schedule and results"


@dataclass(frozen=True)
class StepKind:
    """``prefill-8x32``: prompts of 32 tokens, 8 at once; ``decode-8``: 8 rows with 256 tokens before them."""

    phase: str
    num_rows: int
    num_tokens: int

    @classmethod
    def parse(cls, text: str) -> StepKind:
        phase, _, size = text.partition("-")
        rows, by, tokens = size.partition("x")
        if phase == "prefill":
            return cls(phase, int(rows) if by else 1, int(tokens if by else rows))
        return cls(phase, int(rows), int(tokens) if by else 256)

    @property
    def num_new(self) -> int:
        """Tokens that the step computes."""
        return self.num_rows * (self.num_tokens if self.phase == "prefill" else 1)

    @property
    def num_pairs(self) -> int:
        """Query and key positions that attend."""
        triangle = self.num_tokens * (self.num_tokens + 1) // 2
        return self.num_rows * (triangle if self.phase == "prefill" else self.num_tokens + 1)

    @property
    def title(self) -> str:
        each = "tokens" if self.phase == "prefill" else "tokens of context"
        return f"{self.phase}, {self.num_rows} x {self.num_tokens} {each}"


@dataclass(frozen=True)
class Profile:
    """Medians."""

    model: str
    step: str
    num_threads: int
    gemm_flops_per_s: float
    read_bytes_per_s: float
    flops: int
    weight_bytes: int
    step_s: float
    profiled_s: float
    """Seconds of the step with the clocks."""
    items: dict[str, Item]

    @property
    def limit_s(self) -> float:
        return max(self.flops / self.gemm_flops_per_s, self.weight_bytes / self.read_bytes_per_s)

    def table(self) -> str:
        limit = f"{self.flops / 1e9:.2f} GFLOP at {self.gemm_flops_per_s / 1e9:.0f} GFLOP/s"
        if self.weight_bytes / self.read_bytes_per_s == self.limit_s:
            limit = f"{self.weight_bytes / 1e6:.1f} MB of weights at {self.read_bytes_per_s / 1e9:.1f} GB/s"
        lines = [
            f"**{self.model}, {self.step}, {self.num_threads} thread(s)**: {self.step_s * 1e6:,.0f} µs; "
            f"limit {self.limit_s * 1e6:,.0f} µs ({limit}); ratio {self.step_s / self.limit_s:.2f}\n",
            "| operator | calls | µs | share |",
            "|---|---|---|---|",
        ]
        total = sum(item.seconds for item in self.items.values())
        for name, item in sorted(self.items.items(), key=lambda pair: -pair[1].seconds):
            share = item.seconds / total
            lines.append(f"| {name} | {item.calls} | {item.seconds * 1e6:,.0f} | {share:.1%} |")
        return "\n".join(lines) + "\n"


class Steps:
    """An engine that is brought to the same kind of step again and again."""

    def __init__(self, model_dir: Path, kind: StepKind, num_threads: int) -> None:
        self.kind = kind
        total = kind.num_rows * kind.num_tokens
        self._engine = Engine(
            EngineConfig(
                model_dir,
                "both",
                max_num_seqs=max(8, kind.num_rows),
                max_batch_tokens=max(64, total if kind.phase == "prefill" else 2048),
                max_model_len=kind.num_tokens + 3 * DECODE_STEPS,
                cache_mode="none",
                cache_memory_bytes=1 << 29,
                num_threads=num_threads,
                stream_interval_s=0.0,
            )
        )
        self.model_config = self._engine.model.config
        self._ids = itertools.count()
        self._left = 0

    def ready(self) -> Callable[[], object]:
        """Returns the engine's next step, which is of this kind."""
        if self._left == 0:
            self._prepare()
        else:
            self._left -= 1
        return self._engine.step

    def _prepare(self) -> None:
        for request in list(self._engine.scheduler.active):
            self._engine.cancel(request.request_id)
        while not self._engine.step().did_nothing:
            pass
        is_decode = self.kind.phase == "decode"
        params = SamplingParams(
            max_tokens=2 * DECODE_STEPS if is_decode else 1, temperature=0, ignore_eos=True
        )
        for i in range(self.kind.num_rows):
            tokens = [FIRST_TOKEN_ID + (7 * i + 31 * j) % NUM_TOKEN_IDS for j in range(self.kind.num_tokens)]
            self._engine.add(Request(str(next(self._ids)), tokens, params))
        if is_decode:
            begun: set[str] = set()
            while len(begun) < self.kind.num_rows:
                begun |= {output.request_id for output in self._engine.step().outputs}
            self._left = DECODE_STEPS


def profile(model: str, model_dir: Path, kind: StepKind, num_threads: int, num_rounds: int) -> Profile:
    """Measures one kind of step, after two more rounds to warm up."""
    now = time.thread_time if num_threads == 1 else time.perf_counter
    steps = Steps(model_dir, kind, num_threads)
    torch.set_num_threads(num_threads)  # an engine computes without torch's threads; the limits are torch's
    square, long = torch.randn(GEMM_SIZE, GEMM_SIZE), torch.randn(2**25)
    rounds: list[dict[str, float]] = []
    by_item: dict[str, list[Item]] = defaultdict(list)
    for _ in range(num_rounds + 2):
        clock = StepClock(now)
        rounds.append(
            {
                "gemm": _seconds(now, lambda: square @ square),
                "read": _seconds(now, long.sum),
                "step": _seconds(now, steps.ready()),
                "profiled": _under_clocks(clock, now, steps.ready()),
            }
        )
        for name, item in clock.items.items():
            by_item[name].append(item)
    medians = {name: statistics.median(one[name] for one in rounds[2:]) for name in rounds[0]}
    config = steps.model_config
    return Profile(
        model,
        kind.title,
        num_threads,
        gemm_flops_per_s=2 * GEMM_SIZE**3 / medians["gemm"],
        read_bytes_per_s=long.nbytes / medians["read"],
        flops=step_flops(config, kind.num_new, kind.num_rows, kind.num_pairs),
        weight_bytes=read_weight_bytes(config),
        step_s=medians["step"],
        profiled_s=medians["profiled"],
        items={
            name: Item(statistics.median(one.seconds for one in items[2:]), items[-1].calls)
            for name, items in by_item.items()
        },
    )


def _seconds(now: Callable[[], float], fn: Callable[[], object]) -> float:
    start = now()
    fn()
    return now() - start


def _under_clocks(clock: StepClock, now: Callable[[], float], step: Callable[[], object]) -> float:
    with clocks(clock):
        return _seconds(now, lambda: clock.timed(step, HOST)())


def model_directory(name: str, folder: Path) -> Path:
    """Returns the bundled model, or a checkpoint of :mod:`benchmarks.side_by_side` that takes longer
    prompts."""
    if name == BUNDLED:
        return BUNDLED_MODEL
    folder.mkdir(parents=True, exist_ok=True)
    shape = replace(MODELS[name].shape, max_position_embeddings=MAX_MODEL_LEN)
    return checkpoint(replace(MODELS[name], shape=shape), folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["2m", "120m"], choices=[*MODELS, BUNDLED])
    steps = [StepKind.parse(one) for one in ("prefill-256", "prefill-8x32", "decode-1", "decode-8")]
    parser.add_argument("--steps", nargs="+", type=StepKind.parse, default=steps)
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="writes machine and figures")
    folder = Path(tempfile.gettempdir()) / "twinfang-step-profile"
    parser.add_argument("--folder", type=Path, default=folder, help="where the checkpoints are made")
    options = parser.parse_args()
    found = []
    for name, kind, num_threads in itertools.product(options.models, options.steps, options.threads):
        model_dir = model_directory(name, options.folder)
        found.append(profile(name, model_dir, kind, num_threads, options.rounds))
        print(found[-1].table(), flush=True)
    if options.json:
        figures = {"machine": machine(), "profiles": [asdict(one) for one in found]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
