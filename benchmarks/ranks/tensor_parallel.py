"""Steps of two tensor-parallel ranks compared with those of one rank, all with one thread each.

    python -m benchmarks.ranks.tensor_parallel                          # a look, a minute on two quiet cores
    python -m benchmarks.ranks.tensor_parallel --rounds 20 --json benchmarks/results/tensor_parallel.json
    python -m benchmarks.ranks.tensor_parallel --earlier CHECKOUT       # an earlier commit's ranks too

The engines run in processes of their own (``contender.py``), each rank on its own core. They take turns: in
every round each engine runs a few steps of each case, alone. Other processes make steps longer, never
shorter, so the ratio of the fastest fifths of steps says what the ranks can do, and the ratio of the
medians what they did.

``--earlier`` needs the checkout of a commit that has this room; if it has none, copy the room there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.json_file import write_json
from testing.checkpoints.random_model import MODELS, checkpoint
from testing.marked_section import replace_between
from testing.repository import DOCS, ROOT
from twinfang.bench.machine import machine

DECODE_ROWS = (1, 8, 32)
PROMPT_TOKENS = 512
SUM_ROWS = (1, 8, 32, 512)
PAGE = DOCS / "performance.md"
MARKS = (
    "<!-- tensor-parallel ranks: begin, written by benchmarks.ranks.tensor_parallel -->",
    "<!-- tensor-parallel ranks: end -->",
)
Case = tuple[str, int]
CASES: tuple[Case, ...] = (*(("decode", rows) for rows in DECODE_ROWS), ("prompt", PROMPT_TOKENS))


class Process:
    """A contender's process."""

    def __init__(self, name: str, checkout: Path, model_dir: Path, cores: Sequence[int]) -> None:
        self.name = name
        self.num_ranks = len(cores)
        command = [sys.executable, "-m", "benchmarks.ranks.contender", str(model_dir), str(len(cores))]
        self._process = subprocess.Popen(
            [*command, *map(str, cores)],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def ask(self, *request: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has ended")
        return json.loads(line)


class Times:
    """The steps of one contender in one case."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.waits_s: list[float] = []

    def add(self, answer: dict[str, Any]) -> None:
        self.steps += answer["steps"]
        self.waits_s = [a + b for a, b in zip_longest(self.waits_s, answer["waits"], fillvalue=0.0)]

    def figures(self) -> dict[str, Any]:
        """Milliseconds: the median of all steps, and of the fastest fifth; and the share of waits by rank."""
        fastest = sorted(self.steps)[: -(-len(self.steps) // 5)]
        return {
            "steps": len(self.steps),
            "median_ms": round(1e3 * statistics.median(self.steps), 4),
            "fast_ms": round(1e3 * statistics.median(fastest), 4),
            "waits": [round(wait / sum(self.steps), 4) for wait in self.waits_s],
        }


def run(contenders: list[Process], rounds: int, steps: int) -> dict[str, Any]:
    """Runs all rounds; returns figures by contender and case."""
    times: dict[tuple[str, Case], Times] = defaultdict(Times)
    for number in range(rounds):
        for case in CASES:
            kind, size = case
            for contender in contenders[number % 2 :] + contenders[: number % 2]:
                count = steps if kind == "decode" else 1 if number else 2
                answer = contender.ask(kind, size, count)
                if number or kind == "decode":
                    times[contender.name, case].add(answer)
    return {
        one.name: {
            "ranks": one.num_ranks,
            "cases": {f"{kind} {size}": times[one.name, (kind, size)].figures() for kind, size in CASES},
            "sum_us": sums_alone(one),
        }
        for one in contenders
    }


def sums_alone(contender: Process) -> dict[str, float]:
    """Returns the median µs of a sum of that many rows, by itself."""
    if contender.num_ranks == 1:
        return {}
    return {
        str(rows): round(1e6 * statistics.median(contender.ask("sum", rows, 0)["steps"]), 1)
        for rows in SUM_ROWS
    }


def table(found: dict[str, Any]) -> str:
    """Returns the ratios to one rank, a line for each case."""
    one, *several = found
    heads = ["step", f"{one}, ms"]
    for name in several:
        heads += [f"{name}, ms", "times as fast", "waiting"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for case, alone in found[one]["cases"].items():
        cells = [case, f"{alone['fast_ms']:.2f}"]
        for name in several:
            figures = found[name]["cases"][case]
            ratios = [alone[which] / figures[which] for which in ("fast_ms", "median_ms")]
            cells += [
                f"{figures['fast_ms']:.2f}",
                f"{ratios[0]:.2f} ({ratios[1]:.2f})",
                ", ".join(f"{100 * wait:.0f} %" for wait in figures["waits"]),
            ]
        lines.append("| " + " | ".join(cells) + " |")
    for name in several:
        sums = ", ".join(f"{rows}: {us:g}" for rows, us in found[name]["sum_us"].items())
        lines.append(f"\n{name}: µs of a sum alone, by rows: {sums}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="120m")
    parser.add_argument("--rounds", type=int, default=6, help="default: 6")
    parser.add_argument("--steps", type=int, default=12, help="decode steps of a turn; default: 12")
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1], help="default: 0 1")
    parser.add_argument("--earlier", type=Path, help="measure the ranks of this checkout too")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is kept; default: a temporary one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--publish", action="store_true", help="write the table into docs/performance.md")
    return parser.parse_args()


def main() -> None:
    options = parse()
    about = machine()
    with tempfile.TemporaryDirectory() as temporary:
        model_dir = checkpoint(MODELS[options.model], options.folder or Path(temporary))
        contenders = [
            Process("one rank", ROOT, model_dir, options.cores[:1]),
            Process("two ranks", ROOT, model_dir, options.cores),
        ]
        if options.earlier:
            contenders.insert(1, Process("two ranks, earlier", options.earlier, model_dir, options.cores))
        found = run(contenders, options.rounds, options.steps)
        for contender in contenders:
            contender.close()
    print(f"load average {about['load_average']:.2f} before, {os.getloadavg()[0]:.2f} after")
    print(table(found))
    if options.publish:
        replace_between(PAGE, *MARKS, table(found))
    if options.json:
        write_json(options.json, {"machine": about, "load_after": os.getloadavg()[0], "contenders": found})


if __name__ == "__main__":
    main()
