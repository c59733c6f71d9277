"""Compares serving: Twinfang disaggregated and monolithic, vLLM likewise, transformers' ``generate``.

    python -m benchmarks.side_by_side --vllm /path/to/venv --publish        # what `make bench` does
    python -m benchmarks.side_by_side --rounds 1 --scale 0.1 --models 2m    # a look
    python -m benchmarks.side_by_side --from benchmarks/results/serving.json --publish   # table and plot anew

Checkpoints, client, prompts and cores are the same for all. Arrangements take turns: each round starts,
measures and stops every one of them. A figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serving.load import LoadError
from benchmarks.side_by_side.arrangement import Arrangement
from benchmarks.side_by_side.contenders import chosen, versions
from benchmarks.side_by_side.measurement import answer, measure, workload
from benchmarks.side_by_side.options import parse
from benchmarks.side_by_side.plan import Visit, expected_s, visits
from benchmarks.side_by_side.publication import publish, write
from benchmarks.side_by_side.report import answers_line, medians, pairs_table, plot, summary_line, table
from testing.checkpoints.random_model import MODELS, BenchmarkModel, checkpoint, num_parameters
from twinfang.bench.machine import machine
from wire.errors import TwinfangError

FAILURES = (LoadError, TwinfangError, httpx.HTTPError, ExceptionGroup)


@dataclass(frozen=True)
class Bench:
    """One run, and its results so far."""

    options: argparse.Namespace
    arrangements: dict[str, Arrangement]
    models: list[BenchmarkModel]
    checkpoints: dict[str, Path]
    report: dict[str, Any]

    def run(self) -> None:
        started = time.monotonic()
        plan = visits(self.models, list(self.arrangements), self.options.rounds)
        for number, visit in enumerate(plan, start=1):
            title = self.arrangements[visit.arrangement].title
            print(
                f"[{time.monotonic() - started:4.0f} s] {number}/{len(plan)}, round {visit.round + 1}: "
                f"{visit.model.title}, {title}",
                flush=True,
            )
            try:
                self.visit(visit)
            except FAILURES as error:
                message = "; ".join(map(str, getattr(error, "exceptions", [error])))
                print(f"  failed: {message}", file=sys.stderr, flush=True)
                self.report["failures"].append(about(visit) | {"error": message})
            self.report["medians"] = medians(self.report["measurements"])
            self.report["seconds"] = round(time.monotonic() - started)
            write(self.report, self.options.json or self.options.folder / "serving.json")

    def visit(self, visit: Visit) -> None:
        options, model = self.options, visit.model
        load = workload(model.shape.vocab_size, options.input_len, options.output_len)

        def done(figures: dict[str, Any]) -> None:
            self.report["measurements"].append(about(visit) | figures)
            print(summary_line(figures), flush=True)

        started = time.monotonic()
        arrangement = self.arrangements[visit.arrangement]
        with arrangement.running(self.checkpoints[model.name]) as server:
            self.report["starts_s"].append(about(visit) | {"seconds": round(time.monotonic() - started, 1)})
            answers = self.report["answers"][model.name]
            if visit.arrangement not in answers:
                answers[visit.arrangement] = answer(server, model.name, load.prompt(0))
            measure(server, visit, load, options.scale * arrangement.share, done)


def about(visit: Visit) -> dict[str, Any]:
    return {"model": visit.model.name, "arrangement": visit.arrangement, "round": visit.round}


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Runs everything; returns the report."""
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    os.sched_setaffinity(0, cores)  # servers inherit it
    options.folder.mkdir(parents=True, exist_ok=True)
    before = machine()
    print(f"{before['processor']}, {len(cores)} cores, load {before['load_average']:.1f}")
    arrangements, models = chosen(options), [MODELS[name] for name in options.models]
    if not arrangements:
        raise SystemExit("nothing is left to measure")
    expected = expected_s(models, options.rounds, options.scale)
    print(
        f"{', '.join(arrangements)}; rounds: {options.rounds}; about {expected / 60:.0f} minutes", flush=True
    )
    checkpoints = {model.name: checkpoint(model, options.folder) for model in models}
    report: dict[str, Any] = {
        "machine": before,
        "versions": versions(options),
        "settings": {name: getattr(options, name) for name in ("rounds", "scale", "input_len", "output_len")}
        | {"cores": len(cores)},
        "models": {
            model.name: {"title": model.title, "parameters": num_parameters(checkpoints[model.name])}
            for model in models
        },
        "arrangements": {name: one.settings() for name, one in arrangements.items()},
        "seconds": 0,
        "medians": [],
        "starts_s": [],
        "answers": {model.name: {} for model in models},
        "failures": [],
        "measurements": [],
    }
    Bench(options, arrangements, models, checkpoints, report).run()
    return report


def main() -> int:
    options = parse(__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or what it has started would outlive it
    if options.source is None:
        report = measured(options)
    else:
        report = json.loads(options.source.read_text(encoding="utf-8"))
    print(f"\n{table(report)}\n\n{pairs_table(report)}\n\n{answers_line(report)}")
    if options.plot:
        plot(report, options.plot)
    if options.publish:
        publish(report)
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
