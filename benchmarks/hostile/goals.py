"""The most that a victim may lose, and whether a trial kept to it."""

from __future__ import annotations

from typing import Any

MAX_GAP_S = 0.5
MIN_THROUGHPUT = 0.7
"""Least share of the throughput that the victim has beside well-behaved clients."""
MAX_PROBE_S = 0.5
MAX_MEMORY = 1.15
"""Most memory of a process a minute after the attack, as a multiple of that before it."""


def judged(trial: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns each goal with its figure, its limit, and whether it is met."""
    baseline, attacked, memory = trial["baseline"], trial["attacked"], trial["memory_mib"]
    rate = attacked["tokens_per_s"] / baseline["tokens_per_s"] if baseline["tokens_per_s"] else 0.0
    goals = [
        _at_most("worst gap in a victim's stream, s", attacked["worst_gap_s"], MAX_GAP_S),
        {
            "goal": "victim's tokens/s, of the baseline's",
            "value": round(rate, 3),
            "limit": MIN_THROUGHPUT,
            "met": rate >= MIN_THROUGHPUT,
        },
        _at_most("errors that the victim got", attacked["errors"], 0),
    ]
    for path, slowest in attacked["probes_max_s"].items():
        goals.append(_at_most(f"slowest {path}, s", slowest, MAX_PROBE_S))
    goals.append(_at_most("probes that failed", attacked["probe_errors"], 0))
    for name, before in memory["before"].items():
        after = memory["after"].get(name)
        ratio = None if after is None else round(after / before, 3)
        goals.append(_at_most(f"memory of {name} afterwards, of before", ratio, MAX_MEMORY))
    goals.append(_at_most("processes that died", sum(trial["restarts"].values()), 0))
    return goals


def _at_most(goal: str, value: float | None, limit: float) -> dict[str, Any]:
    return {"goal": goal, "value": value, "limit": limit, "met": value is not None and value <= limit}
