"""Are greedy tokens the same whichever tier a prompt's start comes from? No speed.

    python -m benchmarks.caches.tiers_exact --json benchmarks/results/tiers_exact.json
    python -m benchmarks.caches.tiers_exact --device cuda --prompts 60

Random prompts with shared beginnings run in every cell of a grid (:mod:`testing.tiers.cell`): tiers, cache
modes, drafts, one and two tensor-parallel ranks, formats of the KV cache; in a few more cells also other
models, policies and formats of states. Pools are as small as the configuration allows, and the sanitizer is
on. The reference has one prompt at a time, no cache and no drafts. Ends with 1 if any answer differs.

The configurations in which every two values meet come first. The figures are written after each
configuration, and a run with the same file goes on behind those that it has. ``refused`` names the cells
that a configuration does not allow, and why.

``ranks_apart`` counts answers of the references with two ranks that differ from those with one: sums over
ranks have another order.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from benchmarks.json_file import read_json, write_json
from testing.checkpoints.random_checkpoint import DENSE_WITH_MTP, MOE_WITH_MTP, make_checkpoint
from testing.tiers.cell import OTHERS, Cell, Device, grid
from testing.tiers.prompts import shared_prompts
from testing.tiers.trial import expected_answers, try_cell
from twinfang.bench.machine import machine
from twinfang.flags.table import BUNDLED_MODEL

Answers = list[list[int]]


class Table:
    """Runs configurations one after another, and keeps what their cells have shown."""

    def __init__(self, folder: Path, num_prompts: int, seed: int, known: dict[str, Any] | None) -> None:
        self._folder = folder
        self._models = {"bundled": BUNDLED_MODEL}
        self._expected: dict[Cell, Answers] = {}
        self.figures: dict[str, Any] = {"machine": machine(), "prompts": num_prompts, "seed": seed}
        is_same = known is not None and (known["prompts"], known["seed"]) == (num_prompts, seed)
        self._rows: dict[str, Any] = known["cells"] if known and is_same else {}
        self._refused: dict[str, list[str]] = {}
        self._ranks_apart: dict[str, int] = known["ranks_apart"] if known and is_same else {}

    def run(self, cells: Sequence[Cell]) -> None:
        """Runs the cells of one configuration, unless all of them are known."""
        directory = self._folder / str(cells[0])
        model_dir = self._model_dir(cells[0].model)
        allowed = []
        for cell in cells:
            refusal = cell.refusal(model_dir, directory)
            if refusal is None:
                allowed.append(cell)
            else:
                self._refused.setdefault(refusal.replace(str(directory), "DIR"), []).append(str(cell))
        if all(str(cell) in self._rows for cell in allowed):
            return
        for cell in allowed:
            prompts = shared_prompts(self.figures["prompts"], self.figures["seed"], cell.scale)
            expected = self._answers(cell, model_dir, prompts)
            row = try_cell(cell, model_dir, directory, prompts, expected).as_row()
            self._rows[str(cell)] = row
            print(f"{cell!s:75} {row['cached_tokens']} {row['mismatches']} {row['seconds']} s", flush=True)
        shutil.rmtree(directory, ignore_errors=True)

    def _model_dir(self, name: str) -> Path:
        if name not in self._models:
            shape = {"dense": DENSE_WITH_MTP, "moe": MOE_WITH_MTP}[name]
            self._models[name] = make_checkpoint(self._folder / name, shape, seed=5)
        return self._models[name]

    def _answers(self, cell: Cell, model_dir: Path, prompts: Answers) -> Answers:
        reference = cell.reference
        if reference not in self._expected:
            self._expected[reference] = expected_answers(cell, model_dir, self._folder, prompts)
            if reference.ranks > 1:
                alone = self._answers(replace(cell, ranks=1), model_dir, prompts)
                apart = sum(a != b for a, b in zip(alone, self._expected[reference], strict=True))
                self._ranks_apart[str(reference)] = apart
        return self._expected[reference]

    def summary(self) -> dict[str, Any]:
        rows = self._rows.values()
        return self.figures | {
            "num_cells": len(rows),
            "tokens": sum(row["tokens"] for row in rows),
            "mismatches": sum(row["mismatches"] for row in rows),
            "ranks_apart": self._ranks_apart,
            "refused": self._refused,
            "cells": self._rows,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=500, help="prompts in each cell")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="run only configurations whose names have this text")
    parser.add_argument("--device", choices=get_args(Device), default="cpu", help="cuda: cells of one rank")
    parser.add_argument("--json", type=Path, help="write the figures there, after each configuration")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    known = read_json(options.json) if options.json else None
    with tempfile.TemporaryDirectory(prefix="twinfang-") as folder:
        table = Table(Path(folder), options.prompts, options.seed, known)
        every = [replace(cell, device=options.device) for cell in (*grid(), *OTHERS)]
        if options.device == "cuda":
            every = [cell for cell in every if cell.ranks == 1]
        for configuration, cells in groupby(every, key=lambda cell: cell.configuration):
            if options.only in str(configuration):
                table.run(list(cells))
                if options.json:
                    write_json(options.json, table.summary())
    figures = table.summary()
    print({name: figures[name] for name in ("num_cells", "tokens", "mismatches", "ranks_apart")})
    sys.exit(1 if figures["mismatches"] else 0)


if __name__ == "__main__":
    main()
