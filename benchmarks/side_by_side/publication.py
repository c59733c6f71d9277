"""Publishes a complete run's figures: the repository's JSON, plot and the README's table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.options import ARRANGEMENTS, CORES, INPUT_LEN, OUTPUT_LEN, ROUNDS
from benchmarks.side_by_side.report import plot, section
from testing.checkpoints.random_model import MODELS
from testing.marked_section import replace_between

PUBLISHED = Path("benchmarks/results/serving.json")
PLOT = Path("docs/serving.png")
DOCUMENT = Path("README.md")
BEGIN = "<!-- written by: make bench -->"
END = "<!-- end of what make bench writes -->"


def write(report: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def is_whole(report: dict[str, Any]) -> bool:
    """Returns whether the report may go into the README: everything was measured, often enough and with the
    usual load."""
    settings = report["settings"]
    usual = (settings["input_len"], settings["output_len"], settings["cores"]) == (
        INPUT_LEN,
        OUTPUT_LEN,
        CORES,
    )
    there = set(report["arrangements"]) == set(ARRANGEMENTS) and len(report["models"]) == len(MODELS)
    enough = settings["rounds"] >= ROUNDS and settings["scale"] >= 1
    return usual and there and enough and not report["failures"]


def publish(report: dict[str, Any]) -> None:
    """Writes the report into the repository's own files, unless something is missing."""
    if not is_whole(report):
        print(f"{PUBLISHED}, {PLOT} and {DOCUMENT} stay as they are: not everything was measured in full")
        return
    write(report, PUBLISHED)
    plot(report, PLOT)
    replace_between(DOCUMENT, BEGIN, END, section(report))
    print(f"written: {PUBLISHED}, {PLOT}, the table in {DOCUMENT}")
