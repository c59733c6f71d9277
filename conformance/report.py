"""The results: JSON for each system, and the table of docs/reliability.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.json_file import read_json, write_json
from conformance.cases import CASES
from conformance.models import TITLES
from conformance.pair import Pair
from conformance.run import Result, Settings
from testing.marked_section import replace_between
from testing.repository import DOCS, RESULTS
from twinfang.bench.machine import machine
from wire.errors import ConfigError

JSON = RESULTS / "conformance.json"
DOCUMENT = DOCS / "reliability.md"
BEGIN = "<!-- written by: python -m conformance --publish -->"
END = "<!-- end of what the conformance suite writes -->"
RUNS = 3
"""Usual number of runs; another one is said in the table."""
SAME = ("title", "lease_s", "deadline_s", "quiet_s", "seed", "long_answer")
"""What runs must have in common to stand in one cell of the table."""
ORDER = [case.name for case in CASES]
COUNTS = ("right", "wrong", "errors", "hangs", "cancelled", "ties")


def system(pair: Pair, results: Sequence[Result], settings: Settings, date: str) -> dict[str, Any]:
    """Returns a system's part of the JSON."""
    host = {key: machine()[key] for key in ("processor", "cores", "python", "load_average")}
    return {
        "title": pair.title,
        "date": date,
        "machine": host,
        "about": dict(pair.about()),
        "models": TITLES,
        "lease_s": pair.lease_s,
        "deadline_s": settings.deadline_s,
        "quiet_s": settings.quiet_s,
        "seed": settings.seed,
        "long_answer": settings.long_answer,
        "results": [asdict(one) for one in sorted(results, key=lambda one: (ORDER.index(one.case), one.run))],
    }


def published(name: str, path: Path = JSON) -> dict[str, Any]:
    """Returns a system's part of the JSON; empty if it has none."""
    found: dict[str, Any] = (read_json(path) or {"systems": {}})["systems"].get(name, {})
    return found


def done_before(before: dict[str, Any], now: dict[str, Any], cases: Sequence[str]) -> list[Result]:
    """Returns the runs of ``cases`` in ``before`` that need not be repeated. Raises :class:`ConfigError` if
    they were run otherwise than ``now``."""
    results = [Result(**one) for one in before.get("results", ())]
    found = [one for one in results if one.case in cases and one.counts]
    same = {name: (before[name], now[name]) for name in SAME} if found else {}
    if found:
        same["versions"] = before["about"]["versions"], now["about"]["versions"]
    for name, (old, new) in same.items():
        if old != new:
            raise ConfigError(
                f"the runs that are done have {name} {old}, these would have {new}: give the same, or leave "
                "out --continue to run all anew"
            )
    return found


def added(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Returns ``now``, whose results include some of ``before``, with the higher load of both."""
    loads = [part["machine"]["load_average"] for part in (before, now) if part]
    return now | {"machine": now["machine"] | {"load_average": max(loads)}}


def publish(name: str, part: dict[str, Any], path: Path = JSON, document: Path = DOCUMENT) -> None:
    """Puts a system's results into the JSON beside those of others, and writes the table again.

    Results of cases that were not run now are kept. Runs in which the client was starved are left out.
    """
    content = read_json(path) or {"systems": {}}
    results = [Result(**one) for one in part["results"]]
    ours = [asdict(one) for one in results if not one.is_starved]
    now = {one["case"] for one in ours}
    kept = [one for one in published(name, path).get("results", ()) if one["case"] not in now]
    both = sorted([*kept, *ours], key=lambda one: (ORDER.index(one["case"]), one["run"]))
    content["systems"][name] = part | {"results": both}
    write_json(path, content)
    replace_between(document, BEGIN, END, section(content))


def section(content: dict[str, Any]) -> str:
    """Returns Markdown: how the systems were run, and a table of all cases."""
    systems = content["systems"].values()
    lines = [
        *map(_how, systems),
        "",
        "| case | " + " | ".join(part["title"] for part in systems) + " |",
        "|---|" + "---|" * len(systems),
    ]
    for case in CASES:
        cells = [_cell([one for one in part["results"] if one["case"] == case.name]) for part in systems]
        lines.append(f"| {case.title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _how(part: dict[str, Any]) -> str:
    host, versions = part["machine"], part["about"]["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"* **{part['title']}**, {part['date']}: lease {part['lease_s']:g} s, long answers of "
        f"{part['long_answer']} tokens; {named}; {host['processor']}, {host['cores']} cores, "
        f"load {host['load_average']:.0f}."
    )


def _cell(runs: Sequence[dict[str, Any]]) -> str:
    """Sums the runs of a case up."""
    if not runs:
        return "not run"
    if problem := next((str(one["problem"]) for one in runs if one["problem"]), ""):
        return f"does not run: {problem.splitlines()[0][:120].replace('|', '/')}"
    total = {count: sum(one[count] for one in runs) for count in COUNTS}
    lost = [sum(one["lost"].values()) for one in runs]
    asked = sum(total[count] for count in ("right", "wrong", "errors", "hangs"))
    words = [f"{total['right']} of {asked} right"]
    names = {"wrong": "**wrong with HTTP 200**", "errors": "errors", "hangs": "**hang**"}
    words += [f"{total[count]} {name}" for count, name in names.items() if total[count]]
    words += [f"{total['ties']} by ties"] * bool(total["ties"])
    words += [f"**blocks lost: {', '.join(map(str, lost))}**"] * any(lost)
    words += [f"{len(runs)} run" + "s" * (len(runs) > 1)] * (len(runs) != RUNS)
    return ", ".join(words)
