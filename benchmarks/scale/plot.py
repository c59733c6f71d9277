"""The figures of ``scale.py`` as one picture: goodput by pool sizes above, cost by context below."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    loads = [(system, load) for system in report["systems"] for load in system["workloads"]]
    columns = max(len(loads), 4)
    figure, axes = plt.subplots(2, columns, figsize=(3.6 * columns, 7), layout="constrained")
    for axis, (system, load) in zip(axes[0], loads, strict=False):
        _goodput(axis, system, load)
    for axis in axes[0][len(loads) :]:
        axis.set_axis_off()
    panels = (
        ("a sequence's state and KV, GiB", lambda row: row["sequence_bytes"] / 2**30),
        ("a prompt's computing, s", lambda row: row["prompt_s"]),
        ("handoff, s", lambda row: row["handoff_s"]),
        ("tokens/s of a full decode server", lambda row: row["tokens_per_s"] or None),
    )
    for axis, (title, value) in zip(axes[1], panels, strict=False):
        for model, marker in (("hybrid", "o"), ("attention alone", "s")):
            rows = [row for row in report["context"]["rows"] if row["model"] == model]
            axis.plot(
                [row["context"] for row in rows], [value(row) for row in rows], marker=marker, label=model
            )
        axis.set(xscale="log", yscale="log", xlabel="context, tokens", title=title)
        axis.grid(alpha=0.3)
    axes[1][0].legend()
    costs = f"{report['context']['model']} on an assumed GPU unless marked as measured"
    figure.suptitle(f"servers simulated (dotted: formula); step costs computed for {costs}", fontsize=11)
    figure.savefig(path, dpi=100)


def _goodput(axis: Any, system: dict[str, Any], load: dict[str, Any]) -> None:
    """Plots a line for each number of servers over the number of prefill servers; the formula is dashed."""
    for num in sorted({cell["num_prefill"] + cell["num_decode"] for cell in load["cells"]}, reverse=True):
        cells = [cell for cell in load["cells"] if cell["num_prefill"] + cell["num_decode"] == num]
        xs = [cell["num_prefill"] for cell in cells]
        (line,) = axis.plot(xs, [cell["goodput"] for cell in cells], marker="o", label=f"{num} servers")
        axis.plot(xs, [cell["formula"] for cell in cells], linestyle=":", color=line.get_color())
    objective = load["objective"]
    what = f"TTFT {objective['ttft_s']:g} s, TPOT {objective['tpot_s'] * 1e3:g} ms"
    lengths = f"{load['prompts']['mean']} + {load['answers']['mean']} tokens"
    axis.set(xlabel="prefill servers of them", ylabel="requests/s in time", ylim=(0, None))
    axis.set_title(f"{load['name']}, {lengths}, {system['source']}\n{what}", fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
