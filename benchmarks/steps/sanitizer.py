"""The cost of the state sanitizer: decode steps of one engine with and without it; prints a Markdown table.

    python -m benchmarks.steps.sanitizer [--model DIR] [--device auto] [--batch 1,8,32] [--steps 200] \\
        [--threads 1]

Both engines run in one process and take turns, a few steps each, so that other processes disturb both alike.
A cell is the median step's rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from twinfang.bench.machine import machine
from twinfang.flags.table import BUNDLED_MODEL
from wire.messages.sampling_params import SamplingParams

PROMPT_TOKENS = 64
STEPS_A_TURN = 10


def make_engine(values: argparse.Namespace, batch: int, *, sanitize: bool) -> Engine:
    """An engine with ``batch`` requests that have all begun to decode."""
    config = EngineConfig(
        values.model,
        "both",
        device=values.device,
        max_num_seqs=max(batch, 2),
        num_threads=values.threads,
        sanitize=sanitize,
        stream_interval_s=0.0,
    )
    engine = Engine(config)
    for i in range(batch):
        prompt = [(7 * i + j) % 200 + 10 for j in range(PROMPT_TOKENS)]
        params = SamplingParams(max_tokens=values.steps + STEPS_A_TURN, temperature=0)
        engine.add(Request(str(i), prompt, params))
    while any(request.num_output == 0 for request in engine.scheduler.running.values()) or (
        engine.scheduler.waiting
    ):
        engine.step()
    return engine


def turns(engine: Engine, num_steps: int) -> Iterator[list[float]]:
    """Yields the seconds of each step, a few steps at a time."""
    for _ in range(num_steps // STEPS_A_TURN):
        seconds = []
        for _ in range(STEPS_A_TURN):
            start = time.perf_counter()
            engine.step()
            if engine.device.type == "cuda":
                torch.cuda.synchronize(engine.device)
            seconds.append(time.perf_counter() - start)
        yield seconds


def measure(values: argparse.Namespace, batch: int) -> tuple[float, float]:
    """Returns the median step without and with the sanitizer, in seconds."""
    off, on = (make_engine(values, batch, sanitize=sanitize) for sanitize in (False, True))
    seconds: tuple[list[float], list[float]] = ([], [])
    for taken in zip(turns(off, values.steps), turns(on, values.steps), strict=True):
        for mine, new in zip(seconds, taken, strict=True):
            mine += new
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(";")[0])
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    values = parser.parse_args()
    print(json.dumps(machine()))
    print("\n| batch | steps/s off | steps/s on | ms a step more |\n|---|---|---|---|")
    for batch in map(int, values.batch.split(",")):
        off, on = measure(values, batch)
        print(f"| {batch} | {1 / off:.0f} | {1 / on:.0f} | {1000 * (on - off):.2f} |", flush=True)


if __name__ == "__main__":
    main()
