"""The kernel table of docs/performance.md, from the results of runs.

    python -m benchmarks.kernels.report

GPU rows come from ``results/kernels-gpu.json``. Without that file they are listed with the op's work, and
marked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.kernels.cases.by_device import gpu_cases
from benchmarks.kernels.cases.case import Case
from testing.marked_section import replace_between

CPU_RESULT = Path("benchmarks/results/kernels.json")
GPU_RESULT = Path("benchmarks/results/kernels-gpu.json")
DOCUMENT = Path("docs/performance.md")
BEGIN = "<!-- written by: python -m benchmarks.kernels.report -->"
END = "<!-- end of the kernel table -->"

HEADER = (
    "| op | shape | must do | µs | achieved | limit | ratio | peer µs (ours is × faster) |\n"
    + "|---" * 8
    + "|"
)
NOT_RUN = "–"
MAX_DIFFERENCE = 2e-2
"""From this difference on, two outputs differ by more than rounding to bfloat16."""


def section(cpu: dict[str, Any] | None, gpu: dict[str, Any] | None) -> str:
    """Returns both tables with their headings, and names a missing run."""
    parts = ["### On a CPU", *(_measured(cpu) if cpu else ["Not measured yet."])]
    parts += ["### On a GPU", *(_measured(gpu) if gpu else _not_run(gpu_cases()))]
    return "\n\n".join(parts)


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Returns a table of measured rows; ops in order of their first row."""
    return "\n".join([HEADER, *_lines(rows, _measured_cells)])


def _measured(report: dict[str, Any]) -> Iterator[str]:
    machine, limits = report["machine"], report["limits"]
    device = machine["gpu"] or f"{machine['processor']}, {report['threads']} thread(s)"
    yield (
        f"{device}, torch {machine['torch']}, load average {machine['load_average']:.1f} before the run. "
        f"GEMM {_rate(limits['GEMM'], 'FLOP/s')}. Peers: {_peers(report)}."
    )
    yield table(report["rows"])
    yield from (f"Failed: {failure}." for failure in report["failures"])


def _peers(report: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version or 'missing'}" for name, version in report["peers"].items())


def _not_run(cases: Iterable[Case]) -> Iterator[str]:
    yield "Counted from the shapes."
    rows = [vars(case) | {"flops": case.work.flops, "moved": case.work.moved} for case in cases]
    yield "\n".join(
        [HEADER, *_lines(rows, lambda row: [_must_do(row["moved"], row["flops"]), NOT_RUN, *[""] * 4])]
    )


def _lines(rows: Iterable[dict[str, Any]], cells: Any) -> Iterator[str]:
    ordered = list(rows)
    ops = list(dict.fromkeys(row["op"] for row in ordered))
    by_op = sorted(ordered, key=lambda row: ops.index(row["op"]))
    for op, group in groupby(by_op, key=lambda row: row["op"]):
        for row in group:
            yield f"| {op} | {row['shape']} | {' | '.join(cells(row))} |"


def _measured_cells(row: dict[str, Any]) -> list[str]:
    limit, seconds = row["limit"], row["seconds"]["ours"]
    moved = row["read"] + row["written"]
    is_arithmetic = limit["kind"] == "arithmetic"
    unit = "FLOP/s" if is_arithmetic else "B/s"
    counted = limit["seconds"] * limit["rate"]  # FLOP, with those of functions on a CPU; or bytes
    return [
        _must_do(0, counted) if is_arithmetic else _must_do(moved, 0),
        _microseconds(seconds) + (" (launched)" if "ours" in row["launched"] else ""),
        _rate(counted / seconds, unit),
        f"{limit['kind']} {_rate(limit['rate'], unit)}",
        f"{limit['seconds'] / seconds:.2g}",
        ", ".join(_peer_cells(row)) or "–",
    ]


def _peer_cells(row: dict[str, Any]) -> Iterator[str]:
    ours = row["seconds"]["ours"]
    for name, seconds in row["seconds"].items():
        if name == "ours":
            continue
        notes = " (launched)" if name in row["launched"] else ""
        if row["differences"].get(name, 0.0) > MAX_DIFFERENCE:
            notes += " (another result)"
        yield f"{name} {_microseconds(seconds)}{notes} ({seconds / ours:.1f} ×)"
    for name, why in row["absent"].items():
        yield f"{name} {why.partition(':')[0]}"


def _must_do(moved: int, flops: float) -> str:
    parts = [_size(moved, "B")] if moved else []
    return ", ".join(parts + ([_size(flops, "FLOP")] if flops else []))


def _size(value: float, unit: str) -> str:
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def _rate(value: float, unit: str) -> str:
    return _size(value, unit)


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}" if seconds < 1e-4 else f"{seconds * 1e6:,.0f}"


def _read(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def main() -> None:
    replace_between(DOCUMENT, BEGIN, END, section(_read(CPU_RESULT), _read(GPU_RESULT)))
    print(f"written: the kernel table in {DOCUMENT}")


if __name__ == "__main__":
    main()
