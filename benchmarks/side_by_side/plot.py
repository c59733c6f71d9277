"""The plot of docs/serving.md: the first load of the comparison, for all contenders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.figures import FIGURES

LOAD = "short"
PANELS = ("output_tokens_per_s", "ttft_ms", "tpot_ms")
MARKERS = "osD^vP"


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Plots medians with the rounds' range, a panel for each figure. The axis is logarithmic, so that ratios
    show as distances."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    rows = [row for row in report["medians"] if row["load"] == LOAD]
    models = {name: about["title"].partition(" par")[0] for name, about in report["models"].items()}
    places = sorted(
        {(row["model"], row["at"]) for row in rows},
        key=lambda place: (list(models).index(place[0]), place[1]),
    )
    figure, panels = plt.subplots(1, len(PANELS), figsize=(13, 4), layout="constrained")
    for panel, name in zip(panels, PANELS, strict=True):
        for number, (arrangement, settings) in enumerate(report["arrangements"].items()):
            own = [row for row in rows if row["arrangement"] == arrangement]
            beside = 0.13 * (number - (len(report["arrangements"]) - 1) / 2)
            xs = [places.index((row["model"], row["at"])) + beside for row in own]
            middles = [row[name]["median"] for row in own]
            below = [row[name]["median"] - row[name]["min"] for row in own]
            above = [row[name]["max"] - row[name]["median"] for row in own]
            style = {"marker": MARKERS[number % len(MARKERS)], "linestyle": "none", "capsize": 3}
            panel.errorbar(xs, middles, (below, above), label=settings["title"], **style)
        panel.set(yscale="log", title=FIGURES[name].title, xlabel="model × requests in flight")
        panel.set_xticks(range(len(places)), [f"{models[model]}\n× {number}" for model, number in places])
        panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.minorticks_off()
        panel.grid(axis="y", alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=110)
