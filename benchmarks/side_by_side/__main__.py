"""Compares serving: Twinfang disaggregated and monolithic, vLLM likewise, llama.cpp, transformers.

    python -m benchmarks.side_by_side --vllm /path/to/venv --publish        # what `make bench` does
    python -m benchmarks.side_by_side --rounds 1 --scale 0.1 --models 2m    # a look
    python -m benchmarks.side_by_side --only serve,vllm --loads short,open  # a part
    python -m benchmarks.side_by_side --vllm /path/to/venv --dtype bfloat16 # everybody in bfloat16
    python -m benchmarks.side_by_side --from benchmarks/results/serving.json --publish   # tables anew

Weights, client, prompts and cores are the same for all. Contenders take turns: each round starts, measures
and stops every one of them. A figure is the median of the rounds. Started again with the same code, versions
and settings, a run goes on where it was stopped; it measures again only with ``--anew``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gpu.source import commit, source_hash
from benchmarks.json_file import write_json
from benchmarks.serving.load import LoadError
from benchmarks.side_by_side.contenders.line_up import Contender, chosen, versions
from benchmarks.side_by_side.figures import medians
from benchmarks.side_by_side.limits import measured_limits
from benchmarks.side_by_side.loads import LOADS, PLAIN
from benchmarks.side_by_side.measurement import answer, measure
from benchmarks.side_by_side.models import MODELS
from benchmarks.side_by_side.options import parse
from benchmarks.side_by_side.plan import Point, Visit, expected_s, visits
from benchmarks.side_by_side.plot import plot
from benchmarks.side_by_side.progress import BusyError, Progress, only_run_in
from benchmarks.side_by_side.publication import publish
from benchmarks.side_by_side.tables import (
    answers_line,
    changes_table,
    limits_table,
    long_table,
    pairs_table,
    summary_line,
    verdicts,
)
from twinfang.bench.machine import machine
from wire.errors import TwinfangError

FAILURES = (LoadError, TwinfangError, httpx.HTTPError, OSError, ExceptionGroup)


@dataclass
class Bench:
    """One run."""

    options: argparse.Namespace
    contenders: dict[str, Contender]
    directories: dict[str, Path]
    """Of the models' checkpoints."""
    machine: dict[str, Any]
    progress: Progress
    failures: list[dict[str, Any]] = field(default_factory=list)

    def run(self, plan: list[Visit]) -> None:
        started = time.monotonic()
        for number, visit in enumerate(plan, start=1):
            points = self.progress.left(visit)
            if not points:
                continue
            print(
                f"[{time.monotonic() - started:4.0f} s] {number}/{len(plan)}, round {visit.round + 1}: "
                f"{MODELS[visit.model].title}, {self.title(visit)}",
                flush=True,
            )
            began = time.monotonic()
            try:
                self.visit(visit, points)
            except FAILURES as error:
                message = "; ".join(map(str, getattr(error, "exceptions", [error])))
                print(f"  failed: {message}", file=sys.stderr, flush=True)
                self.failures.append(self.about(visit) | {"variant": visit.variant, "error": message})
            self.progress.seconds += time.monotonic() - began
            self.progress.write()
            write_json(self.options.json or self.options.folder / "serving.json", self.report())

    def visit(self, visit: Visit, points: tuple[Point, ...]) -> None:
        directory = self.directories[visit.model]
        started = time.monotonic()
        with self.contenders[visit.contender].variants[visit.variant].running(directory) as server:
            seconds = round(time.monotonic() - started, 1)
            self.progress.starts_s.append(self.about(visit) | {"variant": visit.variant, "seconds": seconds})
            answers = self.progress.answers.setdefault(visit.model, {})
            if self.title(visit) not in answers:
                answers[self.title(visit)] = answer(server, directory)
            share = self.contenders[visit.contender].plain.share
            for point in points:
                num_requests = point.load.num_requests(visit.model, point.at, self.options.scale * share)
                figures = self.about(visit) | measure(server, directory, point, visit.round, num_requests)
                print(summary_line(figures, point.load.unit), flush=True)
                self.progress.measurements.append(figures)
                self.progress.write()

    def title(self, visit: Visit) -> str:
        title = self.contenders[visit.contender].plain.title
        return title if visit.variant == PLAIN else f"{title}, with {visit.variant}"

    def about(self, visit: Visit) -> dict[str, Any]:
        return {"model": visit.model, "arrangement": visit.contender, "round": visit.round}

    def report(self) -> dict[str, Any]:
        """Returns what this run and earlier ones have measured of what was asked for."""
        measurements = [
            one
            for one in self.progress.measurements
            if one["model"] in self.directories
            and one["arrangement"] in self.contenders
            and one["load"] in self.options.loads
            and one["round"] < self.options.rounds
        ]
        return {
            "machine": self.machine,
            "commit": commit(),
            "versions": self.progress.key["versions"],
            "settings": {name: getattr(self.options, name) for name in ("rounds", "scale", "dtype")}
            | {"cores": len(os.sched_getaffinity(0))},
            "models": {name: MODELS[name].about(self.options.folder) for name in self.directories},
            "loads": {name: LOADS[name].about() for name in self.options.loads},
            "arrangements": {name: one.settings() for name, one in self.contenders.items()},
            "seconds": round(self.progress.seconds),
            "medians": medians(measurements),
            "starts_s": self.progress.starts_s,
            "answers": {name: one for name, one in self.progress.answers.items() if name in self.directories},
            "failures": self.failures,
            "measurements": measurements,
        }


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Runs everything that is left; returns the report."""
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    os.sched_setaffinity(0, cores)  # servers inherit it
    before = machine()
    place = f"{before['processor']}, {len(cores)} cores, load {before['load_average']:.1f}"
    print(f"{place}; weights in {options.dtype}")
    contenders = chosen(options)
    plan = visits(options.models, list(contenders), options.loads, options.rounds) if contenders else []
    if not plan:
        raise SystemExit("nothing is left to measure")
    progress = Progress.kept_in(options.folder, key_of(options, len(cores)))
    if options.anew:
        progress.forget()
    left = [visit for visit in plan if progress.left(visit)]
    print(
        f"{', '.join(contenders)}; rounds: {options.rounds}; {len(plan) - len(left)} of {len(plan)} visits "
        f"are done, the others take about {expected_s(left) / 60:.0f} minutes; kept in {progress.file}",
        flush=True,
    )
    directories = {name: MODELS[name].directory(options.folder) for name in options.models}
    bench = Bench(options, contenders, directories, before, progress)
    bench.run(plan)
    return bench.report() | measured_limits(directories, len(cores))


def key_of(options: argparse.Namespace, num_cores: int) -> dict[str, Any]:
    """Returns what measurements must have in common to belong to one report."""
    flags = {name: text for name, text in vars(options).items() if name.endswith("_flags")}
    return {
        "source": source_hash(),
        "versions": versions(options),
        "scale": options.scale,
        "dtype": options.dtype,
        "cores": num_cores,
        "flags": flags,
    }


def main() -> int:
    options = parse(__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or what it has started would outlive it
    if options.source is None:
        options.folder.mkdir(parents=True, exist_ok=True)
        try:
            with only_run_in(options.folder):
                report = measured(options)
        except BusyError as error:
            raise SystemExit(str(error)) from None
    else:
        report = json.loads(options.source.read_text(encoding="utf-8"))
    tables = (long_table(report), limits_table(report), changes_table(report), pairs_table(report))
    print("\n" + "\n\n".join(filter(None, [*tables, *verdicts(report), answers_line(report)])))
    if options.plot:
        plot(report, options.plot)
    if options.publish:
        publish(report)
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
