"""Results of the rounds: medians, ratios to the yardstick, and whether a ratio means anything."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

YARDSTICK = "vllm"
BETTER, EQUAL, WORSE, UNDECIDED = "better", "equal", "worse", "one round"


@dataclass(frozen=True)
class Figure:
    """One figure of a measurement."""

    title: str
    digits: int
    """Decimals in tables."""
    more_is_better: bool = False


FIGURES = {
    "goodput_per_s": Figure("goodput, requests/s", 1, more_is_better=True),
    "output_tokens_per_s": Figure("output tokens/s", 1, more_is_better=True),
    "ttft_ms": Figure("TTFT, ms", 1),
    "tpot_ms": Figure("TPOT, ms", 2),
}

Cell = tuple[str, str, int, str]
"""Model, load, requests in flight (or at what rate), contender."""
Rounds = Mapping[int, Mapping[str, float]]
"""Figures by the round's number."""


def figures_of(measurement: Mapping[str, Any]) -> dict[str, float]:
    """Returns a measurement's figures; for times, the median over its requests.

    Under an open load, output tokens per second only follow the arrivals: goodput takes their place.
    """
    rate = "goodput_per_s" if "goodput_per_s" in measurement else "output_tokens_per_s"
    times = {name: measurement[name]["p50"] for name in ("ttft_ms", "tpot_ms")}
    return {rate: measurement[rate], **times}


def by_round(measurements: Iterable[Mapping[str, Any]]) -> dict[Cell, Rounds]:
    groups: dict[Cell, dict[int, Mapping[str, float]]] = {}
    for one in measurements:
        cell = (one["model"], one["load"], one["at"], one["arrangement"])
        groups.setdefault(cell, {})[one["round"]] = figures_of(one)
    return dict(groups)


# --- comparison -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A figure as a multiple of another one. Both are compared round by round: a disturbance in a round
    affects both sides."""

    ratio: float
    """The median of the rounds' ratios."""
    low: float
    high: float
    rounds: int

    def verdict(self, *, more_is_better: bool) -> str:
        """Returns whether the first figure is better than the second, or worse.

        Figures are equal if the rounds don't agree on their order, or if the median ratio is no further from
        1 than half of the distance between the smallest and the largest ratio. One round decides nothing.
        """
        if self.rounds < 2:
            return UNDECIDED
        if self.low <= 1 <= self.high or abs(self.ratio - 1) <= (self.high - self.low) / 2:
            return EQUAL
        return BETTER if (self.ratio > 1) == more_is_better else WORSE


def compare(ours: Rounds, theirs: Rounds, figure: str) -> Comparison | None:
    """Returns None if no round has both. There is no ratio to 0, which is the time between tokens that arrive
    all at once, or the goodput of a server that met no objective."""
    pairs = [(ours[number][figure], theirs[number][figure]) for number in ours if number in theirs]
    ratios = [one / other for one, other in pairs if other]
    if not ratios:
        return None
    return Comparison(
        round(statistics.median(ratios), 3), round(min(ratios), 3), round(max(ratios), 3), len(ratios)
    )


def medians(measurements: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each cell, in the order of their first measurement."""
    groups = by_round(measurements)
    rows = []
    for (model, load, at, contender), rounds in groups.items():
        yardstick = groups.get((model, load, at, YARDSTICK), {})
        row: dict[str, Any] = {"model": model, "load": load, "at": at, "arrangement": contender}
        for name in next(iter(rounds.values())):
            values = [figures[name] for figures in rounds.values()]
            row[name] = {
                "median": round(statistics.median(values), 3),
                "min": round(min(values), 3),
                "max": round(max(values), 3),
                "rounds": len(values),
            }
            comparison = compare(rounds, yardstick, name)
            if comparison is not None and contender != YARDSTICK:
                row[name] |= {
                    f"ratio_to_{YARDSTICK}": comparison.ratio,
                    "ratios": [comparison.low, comparison.high],
                    "verdict": comparison.verdict(more_is_better=FIGURES[name].more_is_better),
                }
        rows.append(row)
    return rows
