"""Tables and plot of docs/cache-policies.md: what caches hit on each log, and how soon first tokens come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testing.marked_section import replace_between
from twinfang.cache_sim.contenders import CONTENDERS

DOCUMENT = Path("docs/cache-policies.md")
PLOT = Path("docs/cache-policies.png")
BEGIN = "<!-- written by: python -m benchmarks.caches.eviction_grid --publish -->"
END = "<!-- end of what the eviction grid writes -->"
GIB = 1 << 30
COLUMNS = 5
STYLES = {
    "lru": "o:",
    "value": "s--",
    "value+placement": "D-",
    "served": "v-",
    "marconi": "^--",
    "clairvoyant": "x:",
}

Report = Mapping[str, Sequence[Mapping[str, Any]]]
"""For each log its budgets, each with the figures of all caches."""


def publish(report: Report) -> None:
    """Writes both tables and the plot."""
    heading = "| log | budget | " + " | ".join(f"`{name}`" for name in CONTENDERS) + " |"
    ruler = "|---|---|" + "---|" * len(CONTENDERS)
    hits = [heading, ruler, *_rows(report, _hit_text)]
    times = [heading, ruler, *_rows(report, _time_text)]
    text = "\n".join(
        [
            f"![Tokens hit, by log, cache and budget]({PLOT.name})",
            "",
            "Tokens of prompts that were not computed. Bold: the best that does not know the future.",
            "",
            *hits,
            "",
            "Time to the first token in milliseconds: mean, and P95 behind it.",
            "",
            *times,
        ]
    )
    replace_between(DOCUMENT, BEGIN, END, text)
    plot(report, PLOT)


def _rows(report: Report, text: Any) -> list[str]:
    return [
        f"| {log} | {cell['budget_bytes'] / GIB:.1f} GiB | " + " | ".join(text(cell["caches"])) + " |"
        for log, cells in report.items()
        for cell in cells
    ]


def _hit_text(caches: Mapping[str, Mapping[str, Any]]) -> list[str]:
    best = max(one["hit_tokens"] for name, one in caches.items() if name != "clairvoyant")
    return [
        f"**{one['hit_rate']:.1%}**"
        if one["hit_tokens"] == best and name != "clairvoyant"
        else f"{one['hit_rate']:.1%}"
        for name, one in caches.items()
    ]


def _time_text(caches: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [f"{1e3 * one['mean_ttft_s']:.0f}, {1e3 * one['p95_ttft_s']:.0f}" for one in caches.values()]


def plot(report: Report, path: Path) -> None:
    """Plots the tokens hit against the budget, a panel for each log."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter

    rows = -(-len(report) // COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(15, 3.2 * rows), layout="constrained", squeeze=False)
    panels = list(axes.flat)
    for panel, (log, cells) in zip(panels, report.items(), strict=False):
        places = range(len(cells))
        for name in CONTENDERS:
            hits = [100 * cell["caches"][name]["hit_rate"] for cell in cells]
            panel.plot(places, hits, STYLES[name], label=name, markersize=4)
        panel.set(title=log, ylim=(0, 100), xlabel="budget, GiB")
        panel.set_xticks(places, [f"{cell['budget_bytes'] / GIB:.3g}" for cell in cells])
        panel.yaxis.set_major_formatter(PercentFormatter())
        panel.grid(alpha=0.3)
    for panel in panels[len(report) :]:
        panel.set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(STYLES))
    figure.savefig(path, dpi=90)
    plt.close(figure)
