"""Results of the rounds: medians, ratios to the yardstick, the README's table and the plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

YARDSTICK = "vllm"
PAIRS = ("up", "vllm-pair")
"""Our and vLLM's pair of a prefill and a decode server, compared in a separate table."""

FIGURES = {
    "output_tokens_per_s": ("output tokens/s", 1),
    "ttft_ms": ("TTFT, ms", 1),
    "tpot_ms": ("TPOT, ms", 2),
}
"""Title and number of decimals."""

Report = Mapping[str, Any]


def figures_of(measurement: Mapping[str, Any]) -> dict[str, float]:
    """Returns a measurement's three figures; for times, the median over its requests."""
    return {
        "output_tokens_per_s": measurement["output_tokens_per_s"],
        "ttft_ms": measurement["ttft_ms"]["p50"],
        "tpot_ms": measurement["tpot_ms"]["p50"],
    }


def medians(measurements: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each model, concurrency and arrangement, in the order of their first measurement.

    A ratio is the median of each round's ratio: disturbances in a round affect both sides.
    """
    groups = by_round(measurements)
    rows = []
    for (model, concurrency, arrangement), rounds in groups.items():
        yardstick = groups.get((model, concurrency, YARDSTICK), {})
        row: dict[str, Any] = {"model": model, "concurrency": concurrency, "arrangement": arrangement}
        for name in FIGURES:
            values = [figures[name] for figures in rounds.values()]
            row[name] = {
                "median": round(statistics.median(values), 3),
                "min": round(min(values), 3),
                "max": round(max(values), 3),
                "rounds": len(values),
                f"ratio_to_{YARDSTICK}": median_ratio(rounds, yardstick, name),
            }
        rows.append(row)
    return rows


Rounds = Mapping[int, Mapping[str, float]]
"""Figures by the round's number."""


def by_round(measurements: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int, str], Rounds]:
    """Groups measurements by model, concurrency and arrangement."""
    groups: dict[tuple[str, int, str], dict[int, Mapping[str, float]]] = {}
    for one in measurements:
        key = (one["model"], one["concurrency"], one["arrangement"])
        groups.setdefault(key, {})[one["round"]] = figures_of(one)
    return dict(groups)


def median_ratio(rounds: Rounds, others: Rounds, figure: str) -> float | None:
    """Returns None if no round has both. There is no ratio to 0, which is the time between tokens that arrive
    all at once."""
    pairs = [(rounds[number][figure], others[number][figure]) for number in rounds if number in others]
    ratios = [ours / theirs for ours, theirs in pairs if theirs]
    return round(statistics.median(ratios), 3) if ratios else None


# --- table ----------------------------------------------------------------------------------------


def table(report: Report) -> str:
    """Returns Markdown: a line for each model, concurrency and figure, a column for each arrangement."""
    titles = {name: settings["title"] for name, settings in report["arrangements"].items()}
    rows = {(row["model"], row["concurrency"], row["arrangement"]): row for row in report["medians"]}
    lines = [
        " | ".join(["| model", "in flight", "", *titles.values()]) + " |",
        "|---|---|---|" + "---|" * len(titles),
    ]
    for model, about in report["models"].items():
        for concurrency in sorted({c for m, c, _ in rows if m == model}):
            for figure, (title, digits) in FIGURES.items():
                is_first = figure == next(iter(FIGURES))
                head = [about["title"], str(concurrency)] if is_first else ["", ""]
                cells = [cell(rows.get((model, concurrency, name)), figure, digits) for name in titles]
                lines.append("| " + " | ".join([*head, title, *cells]) + " |")
    return "\n".join(lines)


def cell(row: Mapping[str, Any] | None, figure: str, digits: int) -> str:
    """Returns the median, and the ratio if it is meaningful."""
    if row is None:
        return "–"
    ratio = row[figure][f"ratio_to_{YARDSTICK}"]
    text = f"{row[figure]['median']:,.{digits}f}"
    return text if ratio is None or row["arrangement"] == YARDSTICK else f"{text} ({ratio:.2f} ×)"


def pairs_table(report: Report) -> str:
    """Returns Markdown: the figures of our prefill and decode server as multiples of vLLM's; empty if one is
    missing."""
    groups = by_round(report["measurements"])
    lines = []
    for model, concurrency, name in groups:
        theirs = groups.get((model, concurrency, PAIRS[1]))
        if name != PAIRS[0] or theirs is None:
            continue
        ratios = [median_ratio(groups[model, concurrency, name], theirs, figure) for figure in FIGURES]
        cells = ["–" if ratio is None else f"{ratio:.2f} ×" for ratio in ratios]
        lines.append(" | ".join(["| " + report["models"][model]["title"], str(concurrency), *cells]) + " |")
    if not lines:
        return ""
    ours, theirs_title = (report["arrangements"][name]["title"] for name in PAIRS)
    titles = [title.partition(",")[0] for title, _ in FIGURES.values()]
    head = " | ".join([f"| {ours} ÷ {theirs_title}", "in flight", *titles]) + " |"
    return "\n".join([head, "|---|---|" + "---|" * len(FIGURES), *lines])


def answers_line(report: Report) -> str:
    """Returns whether all arrangements gave the same greedy answer, and otherwise which did not."""
    unlike = []
    for model, answers in report["answers"].items():
        reference = next(iter(answers.values()), None)
        titles = [
            report["arrangements"][name]["title"] for name, text in answers.items() if text != reference
        ]
        if titles:
            unlike.append(f"{report['models'][model]['title']}: {', '.join(titles)}")
    if unlike:
        return f"Greedy answers to one prompt differ from the first column's ({'; '.join(unlike)})."
    return "As a check, one prompt was sent to every arrangement: the greedy answers were the same."


def section(report: Report) -> str:
    """Returns the README's section: the tables, and the machine on which they were measured."""
    settings, machine = report["settings"], report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    others = statistics.median(one["cores"]["other_cores"] for one in report["measurements"])
    return (
        f"{table(report)}\n\n{pairs_table(report)}\n\n"
        f"Medians of {settings['rounds']} rounds; in each round all arrangements took turns, on "
        f"{settings['cores']} cores of "
        f"{machine['processor']} that servers and client share; random prompts of {settings['input_len']} "
        f"tokens, answers of {settings['output_len']}, float32, the same checkpoints (random weights). In "
        f"brackets: the ratio to vLLM's figure. It is the median of the rounds' ratios, so it can differ "
        f"from the ratio of the medians. For TTFT and TPOT, less is better. Other processes used "
        f"{others:.2f} cores. {answers_line(report)} {versions}.\n\n"
        "![Output tokens/s, TTFT and TPOT of all arrangements](docs/serving.png)"
    )


def summary_line(measurement: Mapping[str, Any]) -> str:
    """Returns a line for the terminal, as soon as a measurement is done."""
    figures, cores = figures_of(measurement), measurement["cores"]
    return (
        f"  {measurement['concurrency']:>3} in flight: {figures['output_tokens_per_s']:>8.1f} tokens/s   "
        f"TTFT {figures['ttft_ms']:>8.1f} ms   TPOT {figures['tpot_ms']:>7.2f} ms   "
        f"cores: server {cores['server_cores']:.2f}, others {cores['other_cores']:.2f}"
    )


# --- plot -----------------------------------------------------------------------------------------


def plot(report: Report, path: Path) -> None:
    """Plots medians with the rounds' range, a panel for each figure. The axis is logarithmic, so that ratios
    show as distances."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    rows: Sequence[Mapping[str, Any]] = report["medians"]
    models = {name: about["title"].partition(" par")[0] for name, about in report["models"].items()}
    places = sorted(
        {(row["model"], row["concurrency"]) for row in rows},
        key=lambda place: (list(models).index(place[0]), place[1]),
    )
    figure, panels = plt.subplots(1, len(FIGURES), figsize=(13, 4), layout="constrained")
    for panel, (name, (title, _)) in zip(panels, FIGURES.items(), strict=True):
        for number, (arrangement, settings) in enumerate(report["arrangements"].items()):
            own = [row for row in rows if row["arrangement"] == arrangement]
            beside = 0.15 * (number - (len(report["arrangements"]) - 1) / 2)
            xs = [places.index((row["model"], row["concurrency"])) + beside for row in own]
            middles = [row[name]["median"] for row in own]
            below = [row[name]["median"] - row[name]["min"] for row in own]
            above = [row[name]["max"] - row[name]["median"] for row in own]
            style = {"marker": "osD^v"[number % 5], "linestyle": "none", "capsize": 3}
            panel.errorbar(xs, middles, (below, above), label=settings["title"], **style)
        panel.set(yscale="log", title=title, xlabel="model × requests in flight")
        panel.set_xticks(range(len(places)), [f"{models[model]}\n× {number}" for model, number in places])
        panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.minorticks_off()
        panel.grid(axis="y", alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=110)
