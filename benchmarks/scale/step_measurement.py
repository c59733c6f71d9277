"""Step costs of a model on this machine: steps of our own engine, timed and fitted.

On a CPU, seconds are CPU time on one thread, because other processes' load changes wall time. On a GPU they
are wall time. Costs of handoffs are those that ``ttft.py`` and ``transfer.py`` have measured.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.speculation.drafts import Stretch
from engine.config import EngineConfig
from engine.cost.step_cost import DecodeCost, HandoffCost, PrefillCost, StepCosts, pairs_of
from engine.engine import Engine
from engine.models import read_config
from engine.request import Request
from testing.repository import RESULTS
from wire.messages.sampling_params import SamplingParams

PROMPT_LENS = (32, 128, 512, 1024, 2048, 4000)
BATCH_SIZES = (1, 8, 24)
CONTEXTS = (32, 512, 2000)
STEPS = 16
"""Decode steps per point."""
CACHE_BYTES = 1 << 28
FIRST_TOKEN_ID, NUM_TOKEN_IDS = 5, 900


@dataclass(frozen=True)
class Point:
    """One kind of step: tokens and pairs of a prefill step, rows and context of a decode step."""

    num: int
    num_pairs_or_context: float
    seconds: float


@dataclass(frozen=True)
class Measured:
    costs: StepCosts
    prefill: list[Point]
    decode: list[Point]
    worst_error: dict[str, float]
    """The largest difference between a point and the fit, relative to the point."""

    def figures(self) -> dict[str, Any]:
        return asdict(self)


def measure_costs(model_dir: Path, rounds: int = 2) -> Measured:
    """Measures the costs; takes a minute for a small model. Medians over ``rounds``, after a short round to
    warm up."""
    torch.set_num_threads(1)
    engine = Engine(
        EngineConfig(
            model_dir,
            "both",
            max_num_seqs=max(BATCH_SIZES),
            cache_mode="none",
            cache_memory_bytes=CACHE_BYTES,
            num_threads=1,
            stream_interval_s=0.0,
        )
    )
    _prefill_round(engine)
    _decode_round(engine, contexts=CONTEXTS[:1])
    prefill = _medians([_prefill_round(engine) for _ in range(rounds)])
    decode = _medians([_decode_round(engine) for _ in range(rounds)])
    prefill_fit, prefill_error = fit(prefill)
    decode_fit, decode_error = fit(decode)
    costs = StepCosts(PrefillCost(*prefill_fit), DecodeCost(*decode_fit), measured_handoff(model_dir))
    return Measured(costs, prefill, decode, {"prefill": prefill_error, "decode": decode_error})


def fit(points: Sequence[Point]) -> tuple[tuple[float, float, float], float]:
    """Fits ``fixed + num * a + pairs_or_context * b``, with no coefficient below 0, by least squares of
    relative errors.

    Also returns the worst relative error.
    """
    seconds = np.array([one.seconds for one in points])
    terms = np.array([(1.0, one.num, one.num_pairs_or_context) for one in points]) / seconds[:, None]
    kept = [0, 1, 2]
    while True:
        found = np.linalg.lstsq(terms[:, kept], np.ones(len(points)), rcond=None)[0]
        if (found >= 0).all():
            break
        del kept[int(np.argmin(found * np.abs(terms[:, kept]).mean(axis=0)))]
    factors = np.zeros(3)
    factors[kept] = found
    error = float(np.abs(terms @ factors - 1).max())
    return (float(factors[0]), float(factors[1]), float(factors[2])), error


def measured_handoff(model_dir: Path) -> HandoffCost:
    """Returns messages and waits as ``ttft.py`` measured them with short prompts, and reads as
    ``transfer.py`` did."""
    rows = json.loads((RESULTS / "ttft.json").read_text(encoding="utf-8"))["results"]
    waits = [
        row["extra_ms"]["queue"] + row["extra_ms"]["rpc"] for row in rows if row["prompt_tokens"] <= 1024
    ]
    handoffs = json.loads((RESULTS / "transfer.json").read_text(encoding="utf-8"))["handoffs"]
    named = {one["name"]: one for one in handoffs}
    short, long = (named[f"bundled: {tokens} tokens"] for tokens in ("16", "16,384"))
    bytes_per_s = (long["num_bytes"] - short["num_bytes"]) / (long["handoff_us"] - short["handoff_us"]) * 1e6
    read_s = short["handoff_us"] / 1e6 - short["num_bytes"] / bytes_per_s
    spec = read_config(model_dir).cache_spec()
    latency_s = statistics.median(waits) / 1e3 + read_s
    return HandoffCost(latency_s, spec.slot_bytes, spec.block_bytes(1), bytes_per_s)


def _medians(rounds: Sequence[Sequence[Point]]) -> list[Point]:
    return [
        Point(same[0].num, same[0].num_pairs_or_context, statistics.median(one.seconds for one in same))
        for same in zip(*rounds, strict=True)
    ]


def _prefill_round(engine: Engine) -> list[Point]:
    """Measures each chunk of prompts of several lengths, one prompt at a time."""
    points = []
    for length in PROMPT_LENS:
        _add(engine, 1, length, num_answer=1)
        done = 0
        while done < length:
            size = min(EngineConfig.max_batch_tokens, length - done)
            points.append(Point(size, pairs_of(done, size), _step_s(engine)))
            done += size
        engine.step()
    return points


def _decode_round(engine: Engine, contexts: Sequence[int] = CONTEXTS) -> list[Point]:
    """Measures batches with the same context in each row; their prompts' steps are not timed."""
    points = []
    for num_rows in BATCH_SIZES:
        for context in contexts:
            _add(engine, num_rows, context, num_answer=2 * STEPS + num_rows)
            begun: set[str] = set()
            while len(begun) < num_rows:
                begun |= {output.request_id for output in engine.step().outputs}
            seconds = statistics.median(_step_s(engine) for _ in range(STEPS))
            for i in range(num_rows):
                engine.cancel(str(i))
            engine.step()
            points.append(Point(num_rows, num_rows * (context + STEPS), seconds))
    return points


def _add(engine: Engine, num: int, length: int, *, num_answer: int) -> None:
    params = SamplingParams(max_tokens=num_answer, temperature=0)
    for i in range(num):
        tokens = [FIRST_TOKEN_ID + (7 * i + 31 * j) % NUM_TOKEN_IDS for j in range(length)]
        engine.add(Request(str(i), tokens, params))


def _step_s(engine: Engine) -> float:
    stretch = Stretch()
    stretch.step(engine)
    return stretch.wall_s if engine.device.type == "cuda" else stretch.cpu_s
