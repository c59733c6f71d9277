"""A soak's results: figures for JSON, and the section of docs/reliability.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.closed_load import PERCENTILES, percentile
from benchmarks.soak.answer import Outcome
from benchmarks.soak.faults import ENDED
from benchmarks.soak.run import Soak
from testing.marked_section import replace_between

MARKS = {
    "plain": (
        "<!-- written by: python -m benchmarks.soak --write-section -->",
        "<!-- end of what the soak writes -->",
    ),
    "tiers": (
        "<!-- written by: python -m benchmarks.soak --tiers --write-section -->",
        "<!-- end of what the soak of tiers writes -->",
    ),
}
"""Where sections of docs/reliability.md begin and end, by the fleet."""
MAX_EXAMPLES = 20
"""Most wrong answers and errors that the JSON shows in full."""


def figures(result: Soak, before: dict[str, object]) -> dict[str, Any]:
    """``before`` is the machine as it was before the run."""
    verdicts = Counter(outcome.verdict for outcome in result.outcomes)
    errors = [outcome for outcome in result.outcomes if outcome.verdict == "error"]
    return {
        "machine": before,
        "settings": vars(result.settings) | {"lineup": result.settings.lineup.name},
        "seconds": round(result.seconds, 1),
        "questions": result.questions,
        "requests": len(result.outcomes),
        "right": verdicts["right"],
        "cancelled_by_client": verdicts["cancelled"],
        "errors": dict(Counter(outcome.code for outcome in errors)),
        "wrong": verdicts["wrong"],
        "leaked": result.num_leaked,
        "state_corrupted": result.num_corrupted,
        "unclean_stops": result.unclean_stops,
        "problem": result.problem,
        "faults": dict(Counter(struck.kind for struck in result.struck)),
        "requests_in_flight_at_faults": sum(struck.num_in_flight for struck in result.struck),
        "notes": [
            f"{struck.process}: {struck.kind}: {struck.note}" for struck in result.struck if struck.note
        ],
        "pauses": len(result.checks),
        "load_averages": [round(check.load_average, 1) for check in result.checks],
        "seconds_until_idle": [round(check.seconds, 2) for check in result.checks],
        "tiers": dict(result.tiers),
        "retries": dict(result.retries),
        "retries_quiet": dict(result.quiet_retries),
        "logged": result.logged,
        "seconds_of_answers": {"quiet": times(result.quiet), "faults": times(result.outcomes)},
        "seconds_to_first_event": {"quiet": ttfts(result.quiet), "faults": ttfts(result.outcomes)},
        "examples": {"wrong": examples(result.wrong), "errors": examples(errors)},
        "leaks": [check.leaked for check in result.checks if check.leaked],
    }


def times(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Returns percentiles of right answers' seconds."""
    return _percentiles([one.seconds for one in outcomes if one.verdict == "right"])


def ttfts(outcomes: Sequence[Outcome]) -> dict[str, float]:
    return _percentiles([one.ttft_s for one in outcomes if one.verdict == "right" and one.ttft_s is not None])


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    named = {f"p{percent}": percentile(values, percent) for percent in PERCENTILES} | {"max": max(values)}
    return {name: round(value, 3) for name, value in named.items()}


def examples(outcomes: Sequence[Outcome]) -> list[dict[str, str]]:
    return [
        {"question": one.question, "request_id": one.request_id, "detail": one.detail}
        for one in outcomes[:MAX_EXAMPLES]
    ]


def section(report: dict[str, Any]) -> str:
    """Markdown."""
    settings, host = report["settings"], report["machine"]
    faults, logged = report["faults"], report["logged"]
    num_faults = sum(count for kind, count in faults.items() if kind != ENDED)
    rows = {
        "requests": report["requests"],
        "right, token for token": report["right"],
        "cancelled by the client, right as far as it came": report["cancelled_by_client"],
        "clear errors": _counted(report["errors"]),
        "wrong: other tokens, a stream cut off, an error that says nothing": report["wrong"],
        "blocks, slots, leases, descriptors and memory not given back": report["leaked"],
        "times that the sanitizer found memory of others": report["state_corrupted"],
        "servers that did not stop cleanly": len(report["unclean_stops"]),
        "faults": f"{num_faults}: {_counted(faults)}",
        "retries by what went wrong": _counted(report["retries"]),
        "logged": _counted(logged),
    }
    if report["tiers"]:
        rows["seen in tiers, between two kills"] = _tiers(report["tiers"])
    lines = [
        f"{report['seconds'] / 60:.0f} minutes, {settings['concurrency']} clients, seed {settings['seed']}, "
        f"{num_faults} faults, {report['pauses']} pauses in which all had to be given back. "
        f"{host['processor']}, {host['cores']} cores, load {host['load_average']:.1f} before the run, "
        f"{_span(report['load_averages'])} in the pauses.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
        "| s | " + " | ".join([*(f"p{percent}" for percent in PERCENTILES), "max"]) + " |",
        "| --- |" + " --- |" * (len(PERCENTILES) + 1),
    ]
    for what, key in (("whole answer", "seconds_of_answers"), ("first event", "seconds_to_first_event")):
        for when, values in report[key].items():
            label = f"{what}, {'no faults' if when == 'quiet' else 'under faults'}"
            lines.append(f"| {label} | " + " | ".join(f"{value:.2f}" for value in values.values()) + " |")
    return "\n".join(lines)


def _tiers(counts: dict[str, int]) -> str:
    """Returns what tiers have counted: prefixes moved, and failures of files."""
    words = {name.removesuffix("_prefixes_total"): count for name, count in counts.items()}
    moved = {name.replace("_cache_", ": "): n for name, n in words.items() if "_total" not in name}
    failed = {
        f"files {name.partition(' ')[2]}": n
        for name, n in words.items()
        if name.startswith("file_cache_fail")
    }
    return _counted(moved | failed)


def _span(values: list[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}" if values else "unknown"


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count) or "none"


def write_section(document: Path, report: dict[str, Any]) -> None:
    """Replaces the text between the marks."""
    replace_between(document, *MARKS[report["settings"]["lineup"]], section(report))
