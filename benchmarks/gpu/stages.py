"""Runs everything that can be measured on a GPU, unattended and within ten minutes: tests, then benchmarks.

    python -m benchmarks.gpu.stages [--out benchmarks/results] [--peers FOLDER]        # make gpu

| file in ``--out`` | holds |
|---|---|
| ``gpu.log`` | what everything printed, and at its end how each stage went |
| ``kernels-gpu.json`` | kernels beside limits and peers |
| ``step-gpu.json`` | whole steps beside their limits |
| ``NVIDIA_….json`` | tiles, tuned for a minute where ``kernels/gpu/tile_tables`` has none for this GPU |

A stage that fails or takes too long does not prevent the next stage; the exit code reports it. Stages that
need a GPU come first; other tests get the remaining time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from kernels.gpu.tiles import DIRECTORY, file_name

TOTAL_S = 570
LOG = "gpu.log"
TUNING_S = 60
TEST_PROCESSES = 8
GRACE_S = 5.0


@dataclass(frozen=True)
class Stage:
    """One command."""

    name: str
    limit_s: float
    arguments: tuple[str, ...]
    """Arguments of this interpreter."""
    path: Path | None = None
    """A folder of packages that only this stage sees."""


@dataclass(frozen=True)
class Outcome:
    name: str
    seconds: float
    verdict: str
    """``ok``, ``exit code N`` or ``stopped``"""


def stages(out: Path, peers: Path | None) -> Iterator[Stage]:
    """Yields the stages in order. Tests do not see the peers, because transformers would use them if it
    could."""
    pytest = ("-m", "pytest", "-q")
    if importlib.util.find_spec("xdist") is not None:
        pytest += ("-n", str(TEST_PROCESSES), "--dist", "worksteal")
    yield Stage("kernels: tests", 120, (*pytest, "-m", "not exhaustive", "tests/kernels"))
    yield Stage("engine: tests on the GPU", 60, ("-m", "pytest", "-q", "-m", "gpu", "tests/engine"))
    if not tile_table().exists():
        tuning = ("-m", "benchmarks.gpu.tune_tiles", "--budget-s", str(TUNING_S))
        yield Stage("kernels: tiles", TUNING_S + 15, tuning)
    kernels = ("--device", "cuda", "--json", str(out / "kernels-gpu.json"))
    yield Stage("kernels: benchmark", 130, ("-m", "benchmarks.kernels", *kernels), peers)
    yield Stage(
        "steps: benchmark", 170, ("-m", "benchmarks.steps.limit", "--json", str(out / "step-gpu.json"))
    )
    yield Stage("engine: other tests", 150, (*pytest, "-m", "not gpu and not exhaustive", "tests/engine"))
    yield Stage("kernels: further tests", 150, (*pytest, "-m", "exhaustive", "tests/kernels"))


def tile_table() -> Path:
    """Returns the path of this GPU's tiles, if they were ever tuned."""
    return DIRECTORY / file_name(torch.cuda.get_device_name())


def run(stage: Stage, limit_s: float, log: TextIO) -> Outcome:
    """Runs a stage. When this returns, every process of the stage has ended."""
    print(f"\n==== {stage.name}: {' '.join(stage.arguments)}", file=log, flush=True)
    began = time.monotonic()
    paths = [str(stage.path or ""), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, *stage.arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code = process.wait(limit_s)
        verdict = "ok" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        verdict = "stopped"
        os.killpg(process.pid, signal.SIGINT)  # pytest tells what has failed so far
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:
        _end(process)
    return Outcome(stage.name, time.monotonic() - began, verdict)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and its children, which share its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(plan: Iterator[Stage], log: TextIO, total_s: float = TOTAL_S) -> list[Outcome]:
    """Runs each stage until its limit or until the total time is over. Stages without any time left are
    reported."""
    end = time.monotonic() + total_s
    outcomes = []
    for stage in plan:
        left = end - time.monotonic()
        outcome = (
            run(stage, min(stage.limit_s, left), log) if left > 1 else Outcome(stage.name, 0, "no time left")
        )
        outcomes.append(outcome)
        for file in (log, sys.stdout):
            print(f"{outcome.name}: {outcome.verdict}, {outcome.seconds:.0f} s", file=file, flush=True)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--peers", type=Path, help="folder that mamba-ssm, FlashInfer … are installed in")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with open(options.out / LOG, "w", encoding="utf-8") as log:
        outcomes = run_all(stages(options.out, options.peers), log)
    if tile_table().exists():
        shutil.copy(tile_table(), options.out)
    sys.stdout.writelines((options.out / LOG).read_text(encoding="utf-8").splitlines(keepends=True)[-200:])
    if any(outcome.verdict != "ok" for outcome in outcomes):
        raise SystemExit("not everything went well")


if __name__ == "__main__":
    main()
