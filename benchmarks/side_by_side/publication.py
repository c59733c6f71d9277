"""Publishes a complete run's figures: the JSON, the plot, the tables of README.md and docs/serving.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.json_file import write_json
from benchmarks.side_by_side.figures import by_round
from benchmarks.side_by_side.loads import EVERYBODY, LOADS
from benchmarks.side_by_side.models import MODELS
from benchmarks.side_by_side.options import CORES, DTYPES, ROUNDS
from benchmarks.side_by_side.plan import points_of
from benchmarks.side_by_side.plot import plot
from benchmarks.side_by_side.tables import (
    changes_table,
    how_measured,
    limits_table,
    long_table,
    pairs_table,
    short_table,
    verdicts,
)
from testing.marked_section import replace_between

PUBLISHED = Path("benchmarks/results/serving.json")
PLOT = Path("docs/serving.png")
README, DOCUMENT = Path("README.md"), Path("docs/serving.md")
BEGIN = "<!-- written by: make bench -->"
END = "<!-- end of what make bench writes -->"
OPTIONAL = {"llama.cpp"}
"""Contenders that a published run may lack: they must be built first."""


def missing(report: dict[str, Any]) -> list[str]:
    """Returns why the report may not be published: what was not measured, not often enough or not with the
    usual load."""
    settings = report["settings"]
    found = [f"{one['model']}, {one['arrangement']}: failed" for one in report["failures"]]
    if settings["dtype"] != DTYPES[0]:
        found.append(f"weights in {settings['dtype']}, not {DTYPES[0]}")
    if settings["scale"] < 1 or settings["cores"] != CORES:
        found.append(f"scale {settings['scale']} on {settings['cores']} cores, not 1 on {CORES}")
    for name in (*MODELS, *LOADS):
        if name not in (*report["models"], *report["loads"]):
            found.append(name)
    measured = {cell: len(rounds) for cell, rounds in by_round(report["measurements"]).items()}
    contenders = [name for name in EVERYBODY if name in report["arrangements"] or name not in OPTIONAL]
    for load in LOADS.values():
        for model in MODELS:
            for contender in contenders:
                for point in points_of([load], model, contender, load.variant):
                    if measured.get((model, load.name, point.at, contender), 0) < ROUNDS:
                        place = f"{contender}, {model}, {load.name} at {point.at}"
                        found.append(f"{place}: fewer than {ROUNDS} rounds")
    return found


def short_section(report: dict[str, Any]) -> str:
    """Returns what the README says."""
    return (
        f"{short_table(report)}\n\n"
        "Tokens of prompts → answers. In brackets: the ratio to vLLM's figure, the median of the rounds' own "
        f"ratios. For TTFT and TPOT, less is better. {' '.join(verdicts(report))} "
        f"[docs/serving.md](docs/serving.md) has all loads and figures.\n\n{how_measured(report)}"
    )


def long_section(report: dict[str, Any]) -> str:
    """Returns what docs/serving.md says."""
    make = (long_table, limits_table, changes_table, pairs_table)
    tables = [table for one in make if (table := one(report))]
    picture = "![Output tokens/s, TTFT and TPOT of all contenders](serving.png)"
    return "\n\n".join([*verdicts(report), *tables, how_measured(report), picture])


def publish(report: dict[str, Any]) -> None:
    """Writes the report into the repository's own files, unless something is missing."""
    if reasons := missing(report):
        shown = "".join(f"\n  {reason}" for reason in reasons[:8]) + ("\n  …" if reasons[8:] else "")
        print(
            f"{PUBLISHED}, {PLOT}, {README} and {DOCUMENT} stay as they are, because this is missing:{shown}"
        )
        return
    write_json(PUBLISHED, report)
    plot(report, PLOT)
    replace_between(README, BEGIN, END, short_section(report))
    replace_between(DOCUMENT, BEGIN, END, long_section(report))
    print(f"written: {PUBLISHED}, {PLOT}, the tables in {README} and {DOCUMENT}")
