"""The results of ``step_limit.py`` as Markdown tables; without measurements they show the known sizes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.json_file import write_json
from benchmarks.steps.model_shape import TITLES, write_configuration
from benchmarks.steps.step_bytes import decode_bytes, prefill_flops
from engine.cost.step_cost import pairs_of
from engine.cost.step_size import StepSize
from engine.models import read_config
from testing.marked_section import replace_between

RESULTS = Path("benchmarks/results")
DOCUMENT = Path("docs/performance.md")
BEGIN = "<!-- written by: python -m benchmarks.steps.limit --publish -->"
END = "<!-- end of what step_limit writes -->"
NOT_RUN = "–"
DECODE_HEAD = (
    "| model | sampling | batch | k | states are | context | weights | states | KV | logits | together "
    "| limit | device | step |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)
PREFILL_HEAD = (
    "| model | prompt | chunk | TFLOP | limit | prompt takes | of the product's rate |\n"
    "|---|---|---|---|---|---|---|"
)
KERNELS_SHOWN = 6


def publish(report: dict[str, Any]) -> None:
    """Stores the figures, and writes the section again from the stored figures of both kinds of machines."""
    kind = "gpu" if report["device"] == "cuda" else "cpu"
    file = RESULTS / f"step-{kind}.json"
    write_json(file, report)
    write_section()
    print(f"written: {file}, the tables in {DOCUMENT}")


def write_section() -> None:
    replace_between(DOCUMENT, BEGIN, END, section())


def section() -> str:
    """Returns the section, GPU first; only bytes and FLOP if the benchmark has not run there."""
    found = {kind: RESULTS / f"step-{kind}.json" for kind in ("gpu", "cpu")}
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in found.values() if file.exists()]
    if not found["gpu"].exists():
        reports.insert(0, _unmeasured())
    return "\n\n".join(table(report) for report in reports)


def table(report: dict[str, Any]) -> str:
    models: Mapping[str, Any] = report["models"]
    parts = [
        _where(report),
        "\n".join([DECODE_HEAD, *(_decode(row) for one in models.values() for row in one["decode"])]),
        "\n".join([PREFILL_HEAD, *(_prefill(row) for one in models.values() for row in one["prefill"])]),
    ]
    parts += [_start_up(name, one["start_up"]) for name, one in models.items() if one["start_up"]]
    parts += [_kernels(name, one["decode"]) for name, one in models.items() if _has_kernels(one["decode"])]
    return "\n\n".join(part for part in parts if part)


def _where(report: dict[str, Any]) -> str:
    found = report["machine"]
    if not found:
        return "Nemotron-H 8B in bfloat16; bytes and FLOP are counted from the configuration:"
    where = found["gpu"] or f"{found['processor']}, {report['threads']} thread(s)"
    return f"{where}; torch {found['torch']}:"


def _decode(row: dict[str, Any]) -> str:
    moved = row["bytes"]
    shown = [_size(moved[name]) for name in ("weights", "states", "kv", "logits", "total")]
    limit = NOT_RUN if row["limit_ms"] is None else f"{row['limit_ms']:.2f} ms"
    cells = [
        row["model"],
        row["sampling"],
        row["batch"],
        row["num_drafts"],
        _kept(row),
        f"{row['context']:,}",
        *shown,
        limit,
    ]
    cells += [_beside(row[name], row["limit_ms"]) for name in ("device_ms", "step_ms")]
    return _line(cells)


def _kept(row: dict[str, Any]) -> str:
    """Returns how a row with drafts keeps its states; nothing for rows without drafts, which have one."""
    return {"slots": "in slots", "replay": "replayed"}[row["speculative_state"]] if row["num_drafts"] else ""


def _prefill(row: dict[str, Any]) -> str:
    cells = [row["model"], f"{row['tokens']:,}", f"{row['chunk']:,}", f"{row['flops'] / 1e12:.3g}"]
    if row["limit_ms"] is None:
        return _line([*cells, NOT_RUN, "", ""])
    share = f"{row['limit_ms'] / row['prompt_ms']:.0%}"
    return _line([*cells, f"{row['limit_ms']:.1f} ms", f"{row['prompt_ms']:.1f} ms", share])


def _start_up(name: str, engines: Iterable[dict[str, Any]]) -> str:
    lines = [
        f"k = {one['num_drafts']}, chunks of {one['chunk']}: "
        + ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in one["seconds"].items())
        for one in engines
    ]
    return f"Engines of {TITLES[name]} started in: " + "; ".join(lines) + "."


def _has_kernels(rows: list[dict[str, Any]]) -> bool:
    return any(row["kernels"] for row in rows)


def _kernels(name: str, rows: list[dict[str, Any]]) -> str:
    """Returns the longest kernels of each decode step."""
    lines = [
        "| sampling | batch | k | states are | context | launches | longest kernels, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        longest = ", ".join(
            f"`{one['name'][:40]}` × {one['calls']}: {one['ms']:.2f}"
            for one in row["kernels"][:KERNELS_SHOWN]
        )
        launches = sum(one["calls"] for one in row["kernels"])
        cells = [row["sampling"], row["batch"], row["num_drafts"], _kept(row), f"{row['context']:,}"]
        cells += [launches, longest]
        lines.append(_line(cells))
    return f"Kernels of one decode step of {TITLES[name]}, under torch's profiler:\n\n" + "\n".join(lines)


def _unmeasured() -> dict[str, Any]:
    """A report of the 8B shape without times."""
    with TemporaryDirectory() as folder:
        directory = write_configuration("8b", Path(folder), max_model_len=16384)
        size = StepSize.of(read_config(directory, device="cuda"))
    decodes = [
        _without_times(
            "decode",
            sampling="greedy",
            batch=batch,
            num_drafts=k,
            speculative_state="slots",
            context=context,
            bytes={**asdict(moved), "total": moved.total},
        )
        for k in (0, 3)
        for context in (1024, 8192)
        for batch in (1, 8, 64)
        for moved in [decode_bytes(size, batch, batch * context, 1 + k)]
    ]
    flops = prefill_flops(size, 8192, pairs_of(0, 8192), 1)
    prefills = [_without_times("prefill", tokens=8192, chunk=chunk, flops=flops) for chunk in (2048, 8192)]
    return {"machine": None, "models": {"8b": {"decode": decodes, "prefill": prefills, "start_up": []}}}


def _without_times(kind: str, **known: Any) -> dict[str, Any]:
    times = ("limit_ms", "device_ms", "step_ms") if kind == "decode" else ("limit_ms", "prompt_ms")
    return {"model": TITLES["8b"], **known, **dict.fromkeys(times), "kernels": []}


def _beside(ms: float | None, limit_ms: float | None) -> str:
    return "" if ms is None or limit_ms is None else f"{ms:.2f} ms, {ms / limit_ms:.2f} ×"


def _size(num_bytes: float) -> str:
    """Returns a size in decimal units, like rates."""
    unit, size = ("GB", 1e9) if num_bytes >= 1e9 else ("MB", 1e6)
    return f"{num_bytes / size:.3g} {unit}"


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"
