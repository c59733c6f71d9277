"""The figures of ``scale.py`` as tables, between marks of a document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testing.marked_section import replace_between

BEGIN, END = "<!-- {}: written by benchmarks/scale/goodput.py -->", "<!-- end of {} -->"


def write_report(report: dict[str, Any], document: Path) -> None:
    for name, table in (("goodput", goodput_table), ("steps", step_table), ("context", context_table)):
        text = "\n".join(table(report))
        if text:
            replace_between(document, BEGIN.format(name), END.format(name), text)


def goodput_table(report: dict[str, Any]) -> Iterator[str]:
    """Yields the results for the largest number of servers of each workload."""
    yield (
        "| workload | prompt + answer, tokens | TTFT, TPOT | a prefill server, a decode server | servers "
        "| best P : D, simulated | P : D by the formula, simulated | formula said |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for system in report["systems"]:
        for load in system["workloads"]:
            yield _goodput_row(system, load)


def _goodput_row(system: dict[str, Any], load: dict[str, Any]) -> str:
    objective, decode, last = load["objective"], load["rates"]["decode"], load["best"][-1]
    rates = f"{load['rates']['prefill_per_s']:.3g}/s, {decode['requests_per_s']:.3g}/s"
    best, chosen = last["best"], last["by_formula"]
    return (
        f"| {load['name']}, costs {system['source']} | {load['prompts']['mean']} + {load['answers']['mean']} "
        f"| {objective['ttft_s']:g} s, {objective['tpot_s'] * 1e3:g} ms "
        f"| {rates} (bound by {decode['bound']}) "
        f"| {last['servers']} | {best['num_prefill']} : {best['num_decode']}, {best['goodput']:.3g}/s "
        f"| {chosen['num_prefill']} : {chosen['num_decode']}, {chosen['goodput']:.3g}/s "
        f"| {chosen['formula']:.3g}/s |"
    )


def step_table(report: dict[str, Any]) -> Iterator[str]:
    """Yields both systems' costs, in readable units."""
    yield "| cost | " + " | ".join(f"{one['name']}, {one['source']}" for one in report["systems"]) + " |"
    yield "|---|" + "---|" * len(report["systems"])
    rows = (
        ("prefill: a step, weights included, ms", "prefill", lambda c: (c["step_s"] + _weights_s(c)) * 1e3),
        ("prefill: a token, µs", "prefill", lambda c: c["token_s"] * 1e6),
        ("prefill: 1,000 pairs of attention, µs", "prefill", lambda c: c["pair_s"] * 1e9),
        ("decode: a step, weights included, ms", "decode", lambda c: (c["step_s"] + _weights_s(c)) * 1e3),
        ("decode: a row, µs", "decode", lambda c: c["row_s"] * 1e6),
        ("decode: 1,000 tokens of context, µs", "decode", lambda c: c["context_s"] * 1e9),
        ("handoff: messages and waits, ms", "handoff", lambda c: c["latency_s"] * 1e3),
        ("handoff: state, MB", "handoff", lambda c: c["state_bytes"] / 1e6),
        ("handoff: GB/s", "handoff", lambda c: c["bytes_per_s"] / 1e9),
    )
    for label, part, value in rows:
        cells = " | ".join(f"{value(system['costs'][part]):.3g}" for system in report["systems"])
        yield f"| {label} | {cells} |"


def context_table(report: dict[str, Any]) -> Iterator[str]:
    """Yields both models side by side in one cell: hybrid / only attention."""
    yield (
        "| context, tokens | a sequence, MiB | handoff, ms | prompt alone, s "
        "| rows that fit (64 at most) | full decode step, ms | tokens/s |"
    )
    yield "|---|---|---|---|---|---|---|"
    by_model: dict[str, list[dict[str, Any]]] = {}
    for row in report["context"]["rows"]:
        by_model.setdefault(row["model"], []).append(row)
    for ours, other in zip(*by_model.values(), strict=True):
        yield (
            f"| {ours['context']:,} | "
            + " | ".join(
                f"{_text(value(ours))} / {_text(value(other))}"
                for value in (
                    lambda row: row["sequence_bytes"] / 2**20,
                    lambda row: row["handoff_s"] * 1e3,
                    lambda row: row["prompt_s"],
                    lambda row: row["rows"],
                    lambda row: row["step_s"] and row["step_s"] * 1e3,
                    lambda row: row["tokens_per_s"] or None,
                )
            )
            + " |"
        )


def _text(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _weights_s(cost: dict[str, Any]) -> float:
    return float(cost["weights"]["always_s"] + cost["weights"]["experts_s"])
