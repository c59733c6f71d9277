"""Puts the figures of ``make gpu`` where the tables are made from: after a run, on any machine.

    python -m benchmarks.gpu.publish [--out benchmarks/results]

The stages' figures of call 2 become ``results/step-gpu.json`` and ``results/kernels-gpu.json``, tiles go to
``kernels/gpu/tile_tables``, and docs/performance.md gets its tables.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from benchmarks.json_file import read_json, write_json
from benchmarks.kernels import report as kernels_report
from benchmarks.steps import limit_report
from kernels.gpu.tiles import DIRECTORY, file_name

STEPS = "steps "
"""The beginning of the names of stages that measure whole steps."""


def merged(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns one report of whole steps; a model that several stages measured is listed once."""
    models: dict[str, dict[str, list[Any]]] = {}
    for report in reports:
        for name, parts in report["models"].items():
            of_model = models.setdefault(name, {part: [] for part in parts})
            for part, rows in parts.items():
                of_model[part] += rows
    return {**reports[0], "models": models}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results"), help="where the calls wrote to"
    )
    options = parser.parse_args()
    record = read_json(options.out / "gpu-2.json")
    if record is None:
        parser.exit(1, f"{options.out} has no gpu-2.json: run `make gpu` on a GPU first, or name its OUT\n")
    figures = {name: stage["figures"] for name, stage in record["stages"].items() if stage["figures"]}
    if steps := [found for name, found in figures.items() if name.startswith(STEPS)]:
        limit_report.publish(merged(steps))
    if "kernels" in figures:
        write_json(kernels_report.GPU_RESULT, figures["kernels"])
        kernels_report.main()
    table = options.out / file_name(record["device"]["name"])
    if table.exists():
        print(f"written: {shutil.copy(table, DIRECTORY)}")


if __name__ == "__main__":
    main()
