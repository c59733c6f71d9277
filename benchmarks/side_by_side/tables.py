"""Results as Markdown: the README's short table, the long one of docs/serving.md, verdicts."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.side_by_side.figures import (
    BETTER,
    EQUAL,
    FIGURES,
    UNDECIDED,
    WORSE,
    YARDSTICK,
    by_round,
    compare,
)

PAIRS = ("up", "vllm-pair")
"""Our and vLLM's pair of a prefill and a decode server, compared in a separate table."""
OURS = ("up", "serve")
SHORT_COLUMNS = (*OURS, "vllm", "llama.cpp")
SHORT_ROWS = (
    ("2m", "short", 32),
    ("120m", "short", 8),
    ("120m", "long", 1),
    ("120m", "conversation", 4),
    ("2m", "open", 32),
)
"""What tells most: many small steps, a larger model, long prompts, caches, arrivals at a rate."""
CHANGES = {
    "sampled": ("short", "temperature 1, top-p 0.95 ÷ greedy"),
    "repetitive-drafts": ("repetitive", "3 n-gram drafts ÷ none"),
}
"""Loads whose output tokens/s are compared with those of another load."""

Report = Mapping[str, Any]
Row = Mapping[str, Any]


def rows_of(report: Report) -> dict[tuple[str, str, int], dict[str, Row]]:
    """Returns the medians by model, load and requests in flight, then by contender; in the order of models
    and loads."""
    found: dict[tuple[str, str, int], dict[str, Row]] = {}
    models, loads = list(report["models"]), list(report["loads"])
    for row in report["medians"]:
        found.setdefault((row["model"], row["load"], row["at"]), {})[row["arrangement"]] = row
    return dict(
        sorted(found.items(), key=lambda one: (models.index(one[0][0]), loads.index(one[0][1]), one[0][2]))
    )


def where(report: Report, model: str, load: str, at: int) -> list[str]:
    """Returns the cells that say what a row is about."""
    about = report["loads"][load]
    return [report["models"][model]["title"], about["title"], f"{at} {about['unit']}"]


def text(row: Row | None, name: str, *, verdict: bool) -> str:
    """Returns the median, the ratio to the yardstick if there is one, and perhaps what it says."""
    if row is None or name not in row:
        return "–"
    figure = row[name]
    median = f"{figure['median']:,.{FIGURES[name].digits}f}"
    if "verdict" not in figure:
        return median
    judged = f", {figure['verdict']}" if verdict and figure["verdict"] != UNDECIDED else ""
    return f"{median} ({figure[f'ratio_to_{YARDSTICK}']:.2f} ×{judged})"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a table; an empty text without lines."""
    if not lines:
        return ""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# --- tables ---------------------------------------------------------------------------------------


def long_table(report: Report) -> str:
    """Returns a line for each model, load, number in flight and figure, a column for each contender."""
    titles = {name: settings["title"] for name, settings in report["arrangements"].items()}
    lines = []
    for place, rows in rows_of(report).items():
        names = [name for name in FIGURES if any(name in row for row in rows.values())]
        for number, name in enumerate(names):
            head = where(report, *place) if number == 0 else ["", "", ""]
            cells = [text(rows.get(contender), name, verdict=True) for contender in titles]
            lines.append([*head, FIGURES[name].title, *cells])
    return markdown(["model", "load", "", "", *titles.values()], lines)


def short_table(report: Report) -> str:
    """Returns the README's table: ``SHORT_ROWS``, with all figures of a contender in one cell."""
    titles = {
        name: report["arrangements"][name]["title"]
        for name in SHORT_COLUMNS
        if name in report["arrangements"]
    }
    found = rows_of(report)
    lines = []
    for place in SHORT_ROWS:
        if place in found:
            cells = [short_cell(found[place].get(name)) for name in titles]
            lines.append([", ".join(where(report, *place)), *cells])
    return markdown(["", *titles.values()], lines)


def short_cell(row: Row | None) -> str:
    """Returns the figures below one another, each after its title."""
    if row is None:
        return "–"
    lines = []
    for name, figure in FIGURES.items():
        if name in row:
            title, _, unit = figure.title.partition(", ")
            value, bracket, rest = text(row, name, verdict=False).partition(" (")
            lines.append(" ".join(filter(None, [title, value, unit])) + bracket + rest)
    return "<br>".join(lines)


def pairs_table(report: Report) -> str:
    """Returns the figures of our pair of servers as multiples of those of vLLM's; empty if one is missing."""
    groups = by_round(report["measurements"])
    names = ("output_tokens_per_s", "ttft_ms", "tpot_ms")
    lines = []
    for (model, load, at, contender), rounds in groups.items():
        theirs = groups.get((model, load, at, PAIRS[1]))
        if contender == PAIRS[0] and theirs is not None:
            ratios = [compare(rounds, theirs, name) for name in names]
            cells = ["–" if one is None else f"{one.ratio:.2f} ×" for one in ratios]
            lines.append([*where(report, model, load, at), *cells])
    if not lines:
        return ""
    ours, theirs_title = (report["arrangements"][name]["title"] for name in PAIRS)
    titles = [FIGURES[name].title.partition(",")[0] for name in names]
    return markdown([f"{ours} ÷ {theirs_title}", "load", "", *titles], lines)


def changes_table(report: Report) -> str:
    """Returns what sampling and drafts change: output tokens/s as multiples of those of the same contender
    without."""
    groups = by_round(report["measurements"])
    titles = {name: about["title"] for name, about in report["arrangements"].items() if name in SHORT_COLUMNS}
    places = dict.fromkeys((model, load, at) for model, load, at, _ in groups if load in CHANGES)
    lines = []
    for model, load, at in places:
        other, title = CHANGES[load]
        cells = []
        for name in titles:
            ours, theirs = groups.get((model, load, at, name), {}), groups.get((model, other, at, name), {})
            ratio = compare(ours, theirs, "output_tokens_per_s")
            cells.append(
                "–" if ratio is None else f"{ratio.ratio:.2f} × ({ratio.low:.2f} to {ratio.high:.2f})"
            )
        lines.append([title, report["models"][model]["title"], where(report, model, load, at)[2], *cells])
    return markdown(["output tokens/s", "model", "", *titles.values()], lines)


def limits_table(report: Report) -> str:
    """Returns what the machine allows, and how much of it each contender reaches; empty if not measured."""
    titles = {name: about["title"] for name, about in report["arrangements"].items() if name in SHORT_COLUMNS}
    rows = rows_of(report)
    lines = []
    for limit in report.get("limits", ()):
        place = limit["model"], limit["load"], limit["at"]
        if place not in rows:  # a run of some loads alone
            continue
        most = limit["output_tokens_per_s"]
        found = [rows.get(place, {}).get(name, {}).get("output_tokens_per_s") for name in titles]
        shares = ["–" if one is None else f"{one['median'] / most:.0%}" for one in found]
        times = [milliseconds(limit[name]) for name in ("prompt_s", "step_s")]
        lines.append([*where(report, *place), *times, f"{most:,.0f}", *shares])
    head = ["model", "load", "", "a prompt", "a decode step", "limit, output tokens/s", *titles.values()]
    return markdown(head, lines)


def milliseconds(seconds: float) -> str:
    """Returns a time with three digits, or with all those before the point."""
    number = seconds * 1e3
    return f"{number:,.0f} ms" if number >= 100 else f"{number:.3g} ms"


# --- sentences ------------------------------------------------------------------------------------


def verdicts(report: Report) -> Iterator[str]:
    """Yields a line for each of our arrangements: in how many cells it is better than the yardstick, equal or
    worse, and in which it is worse."""
    for name in OURS:
        found = Counter[str]()
        worse = []
        for place, rows in rows_of(report).items():
            for figure, about in FIGURES.items():
                cell = rows.get(name, {}).get(figure, {})
                if "verdict" in cell:
                    found[cell["verdict"]] += 1
                    if cell["verdict"] == WORSE:
                        ratio = cell[f"ratio_to_{YARDSTICK}"]
                        worse.append(f"{', '.join(where(report, *place))}: {about.title} {ratio:.2f} ×")
        if found:
            counts = ", ".join(
                f"{found[one]} {one}" for one in (BETTER, EQUAL, WORSE, UNDECIDED) if found[one]
            )
            yield (
                f"{report['arrangements'][name]['title']} beside vLLM, of {found.total()} figures: {counts}."
                + (f" Worse: {'; '.join(worse)}." if worse else "")
            )


def answers_line(report: Report) -> str:
    """Returns whether all contenders gave the same greedy answer, and otherwise which did not."""
    unlike = []
    for model, answers in report["answers"].items():
        reference = next(iter(answers.values()), None)
        titles = [title for title, answer in answers.items() if answer != reference]
        if titles:
            unlike.append(f"{report['models'][model]['title']}: {', '.join(titles)}")
    if unlike:
        return f"Greedy answers to one prompt differ from the first contender's ({'; '.join(unlike)})."
    return "As a check, one prompt was sent to every server: the greedy answers were the same."


def how_measured(report: Report) -> str:
    settings, machine = report["settings"], report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    others = statistics.median(one["cores"]["other_cores"] for one in report["measurements"])
    return (
        f"Medians of {settings['rounds']} rounds; in each round all contenders took turns, on "
        f"{settings['cores']} cores of {machine['processor']} that servers and client share; "
        f"{settings['dtype']}, the same weights. Other processes used {others:.2f} cores. "
        f"{answers_line(report)} {versions}."
    )


def summary_line(measurement: Mapping[str, Any], unit: str) -> str:
    """Returns a line for the terminal, as soon as a measurement is done."""
    cores = measurement["cores"]
    rate = f"{measurement['output_tokens_per_s']:>8.1f} tokens/s"
    if "goodput_per_s" in measurement:
        rate = f"{measurement['goodput_per_s']:>6.1f} requests/s within objectives"
    return (
        f"  {measurement['load']:<18}{measurement['at']:>3} {unit}: {rate}   "
        f"TTFT {measurement['ttft_ms']['p50']:>8.1f} ms   TPOT {measurement['tpot_ms']['p50']:>7.2f} ms   "
        f"cores: server {cores['server_cores']:.2f}, others {cores['other_cores']:.2f}"
    )
