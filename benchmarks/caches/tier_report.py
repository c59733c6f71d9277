"""What the conversations on several tiers came to: tables, plot, and the section of docs/cache-tiers.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.caches.tier_load import NUM_SESSIONS, NUM_TURNS
from benchmarks.json_file import write_json
from benchmarks.side_by_side.tables import markdown
from testing.marked_section import replace_between

PUBLISHED = Path("benchmarks/results/tiers.json")
DOCUMENT, PLOT = Path("docs/cache-tiers.md"), Path("docs/cache-tiers.png")
BEGIN = "<!-- written by: python -m benchmarks.caches.tiers --publish -->"
END = "<!-- end of what the conversations write -->"
SHOWN = (1, 2, 4, 6, 7, 8, 10, 12)
"""Turns in the tables: all are in the JSON."""
EXPECTED = {"bundled", "120m"}
MARKERS = "osD^"

Report = Mapping[str, Any]


def section(report: Report) -> str:
    """Returns the tables of all models, and how they were measured."""
    parts = [text for about in report["models"].values() for text in _of_model(about)]
    return "\n\n".join([*parts, *_refusals(report), _how(report)])


def _of_model(about: Mapping[str, Any]) -> Iterator[str]:
    visits = about["contenders"]
    if not visits:
        return
    first = next(iter(visits.values()))
    shown = [number for number, row in enumerate(first["turns"]) if row["turn"] in SHOWN]

    def cells(visit: Mapping[str, Any], name: str, digits: int) -> list[str]:
        return [f"{visit['turns'][number][name]:,.{digits}f}" for number in shown]

    lines = [["prompt, tokens", *cells(first, "prompt_tokens", 0)]]
    for visit in visits.values():
        if any(row["cached_tokens"] for row in visit["turns"]):
            lines.append([f"found, {visit['title']}", *cells(visit, "cached_tokens", 0)])
    for visit in visits.values():
        way = visit["uses"] or ("computes anew" if visit["refusals"] else "")
        title = ", ".join(filter(None, (visit["title"], way)))
        lines.append([f"TTFT ms, {title}", *cells(visit, "ttft_ms", 1)])
    turns = [str(first["turns"][number]["turn"]) for number in shown]
    yield f"{about['title'][0].upper() + about['title'][1:]}, turn by turn:"
    yield markdown(["turn", *turns], lines)


def _refusals(report: Report) -> Iterator[str]:
    """Yields what vLLM says where it keeps nothing."""
    said: dict[str, list[str]] = {}
    for about in report["models"].values():
        for visit in about["contenders"].values():
            for one in visit["refusals"]:
                says = one["says"][0] if one["says"] else "nothing"
                titles = said.setdefault(f"{one['what']} (`{one['flags']}`): `{says}`", [])
                titles.append(about["title"])
    if said:
        lines = [f"* {text} ({', '.join(titles)})" for text, titles in said.items()]
        yield "\n".join(["What vLLM says to other ways:", "", *lines])


def _how(report: Report) -> str:
    machine = report["machine"]
    visits = [visit for about in report["models"].values() for visit in about["contenders"].values()]
    others = max((cores["other_cores"] for visit in visits for cores in visit["cores"]), default=0.0)
    equal = ", ".join(
        f"{visit['title']} {visit['answers_equal']} of {visit['answers']} ({about['title']})"
        for about in report["models"].values()
        for visit in about["contenders"].values()
    )
    return (
        f"Medians of {report['sessions']} sessions. {machine['processor']}, {machine['cores']} cores, which "
        f"servers and client share; other processes used at most {others:.2f} cores. Answers equal to those "
        f"of the first row: {equal}."
    )


def plot(report: Report, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    models = list(report["models"].values())
    figure, axes = plt.subplots(1, len(models), figsize=(10, 3.6), layout="constrained", squeeze=False)
    for axis, about in zip(axes[0], models, strict=True):
        for number, visit in enumerate(about["contenders"].values()):
            turns = [row["turn"] for row in visit["turns"]]
            times = [row["ttft_ms"] for row in visit["turns"]]
            axis.plot(turns, times, marker=MARKERS[number % len(MARKERS)], label=visit["title"])
        axis.axvline(len(turns) / 2 + 0.5, color="grey", linestyle=":", linewidth=1)
        axis.set(title=f"{about['title']}: TTFT, ms (median)", xlabel="turn", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.savefig(path, dpi=110)


def missing(report: Report) -> list[str]:
    """Returns why the report may not be published."""
    found = list(report["failures"])
    if report["sessions"] != NUM_SESSIONS:
        found.append(f"{report['sessions']} sessions, not {NUM_SESSIONS}")
    for name in EXPECTED:
        visits = report["models"].get(name, {}).get("contenders", {})
        if set(visits) != {"no tiers", "host", "files", "vllm"}:
            found.append(f"{name}: only {', '.join(visits) or 'nothing'}")
        elif any(len(visit["turns"]) != NUM_TURNS for visit in visits.values()):
            found.append(f"{name}: fewer than {NUM_TURNS} turns")
    return found


def publish(report: Report) -> None:
    """Writes JSON, plot and the document's section."""
    write_json(PUBLISHED, dict(report))
    plot(report, PLOT)
    picture = f"![Time to first token by turn; the servers are killed at the dotted line]({PLOT.name})"
    replace_between(DOCUMENT, BEGIN, END, f"{section(report)}\n\n{picture}")
