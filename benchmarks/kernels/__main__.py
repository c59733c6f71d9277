"""Times every kernel and compares it with its limit and its peers; prints a Markdown table.

    python -m benchmarks.kernels --json benchmarks/results/kernels.json                 # CPU, under 3 minutes
    python -m benchmarks.kernels --device cuda --json benchmarks/results/kernels-gpu.json
    python -m benchmarks.kernels --only scan --only conv --seconds 0.05                  # a look

The JSON is written again after every op, so that an interrupted run keeps its results. On one thread, the
default, CPU time is measured. Other processes hardly change it, but they share the machine's caches and
memory.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.json_file import write_json
from benchmarks.kernels.cases.by_device import cpu_cases, gpu_cases
from benchmarks.kernels.measurement import Bench
from benchmarks.kernels.report import table
from kernels.cpu.host_memory import keep_freed_memory
from twinfang.bench.machine import machine

PEERS = {"cpu": (), "cuda": ("mamba-ssm", "causal-conv1d", "flashinfer-python", "fla-core")}
"""Packages beside torch itself."""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures what the options ask for. If one of our own cases fails, the failure is reported and the case
    left out."""
    device = torch.device(options.device)
    bench = Bench(device, options.seconds)
    cases = gpu_cases() if device.type == "cuda" else cpu_cases()
    report: dict[str, Any] = {
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "peers": {"torch": torch.__version__} | {name: _version(name) for name in PEERS[device.type]},
        "limits": {},
        "rows": [],
        "failures": [],
    }
    for case in cases:
        if options.only and not any(name in case.op for name in options.only):
            continue
        try:
            row = bench.measure(case)
        except Exception as error:
            report["failures"].append(f"{case.op}, {case.shape}: {type(error).__name__}: {error}"[:500])
            print(report["failures"][-1], flush=True)
            continue
        report["rows"].append(row.as_json())
        report["limits"] = bench.rates()
        if options.json is not None:
            write_json(options.json, report)
        print(f"{case.op}, {case.shape}: {row.seconds['ours'] * 1e6:,.1f} µs", flush=True)
    return report


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    parser.add_argument("--only", action="append", help="substring of the ops to run; may come again")
    parser.add_argument("--seconds", type=float, default=0.1, help="for each contender of a case")
    parser.add_argument("--json", type=Path)
    return parser


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as servers do
    report = run(options)
    if report["rows"]:
        print(f"\n{table(report['rows'])}")
    if report["failures"]:
        raise SystemExit(f"{len(report['failures'])} cases of ours failed")


if __name__ == "__main__":
    main()
