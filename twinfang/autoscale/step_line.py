"""How the time between tokens depends on the rows of a decode step, as far as was seen. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

ROW_SHARE = 0.5
"""What a row is taken to add to a step, as a share of its fixed part, while too little was seen."""
SPREAD = 1.3
"""Rows have to differ by so much for a line to be drawn through them."""


@dataclass(frozen=True)
class TpotPoint:
    """One look at decode servers: rows in their steps, the time between tokens at the objective's share."""

    rows: float
    tpot_s: float


@dataclass(frozen=True)
class StepLine:
    """A step takes a fixed part and one for each row."""

    fixed_s: float
    row_s: float
    is_guess: bool = False
    """Whether rows differed too little for it to be more."""

    def at(self, rows: float) -> float:
        return self.fixed_s + self.row_s * rows

    def servers_each(self, rows: float, most_rows: float) -> float:
        """How many a request needs to keep to ``most_rows`` a server on average, if ``rows`` run on each now.

        Fewer servers take longer steps, in which more requests run at a time: what stays is tokens a second.
        A guess counts for shrinking only: that more servers have fewer requests in all would be hoped for.
        """
        tokens_per_s = 1 / self.at(max(rows, 1.0))  # no step has fewer, whatever the average
        found = tokens_per_s * self.at(max(most_rows, 1.0)) / most_rows
        return max(found, 1 / most_rows) if self.is_guess else found


def step_line(points: Sequence[TpotPoint]) -> StepLine | None:
    """By least squares where rows differ, else steep, through the newest point. None: nothing was seen."""
    if not points:
        return None
    rows = [point.rows for point in points]
    if max(rows) >= SPREAD * min(rows):
        mean_rows, mean_s = fmean(rows), fmean(point.tpot_s for point in points)
        moment = sum((point.rows - mean_rows) * (point.tpot_s - mean_s) for point in points)
        slope = max(0.0, moment / sum((one - mean_rows) ** 2 for one in rows))
        fixed_s = mean_s - slope * mean_rows
        return StepLine(fixed_s, slope) if fixed_s > 0 else StepLine(0.0, mean_s / mean_rows)
    newest = points[-1]
    fixed_s = newest.tpot_s / (1 + ROW_SHARE * newest.rows)
    return StepLine(fixed_s, ROW_SHARE * fixed_s, is_guess=True)


def tpot_rows(tpot_s: float, points: Sequence[TpotPoint]) -> float:
    """Rows of a step at which this objective is met; infinite if nothing speaks against any number.

    What took t with r rows stays within it up to ``r * tpot_s / t`` rows at least, if it does, and at most
    that, if it does not, whatever the line says.
    """
    line = step_line(points)
    if line is None:
        return math.inf
    allowed = (tpot_s - line.fixed_s) / line.row_s if line.row_s else math.inf
    bounds = [(point.tpot_s <= tpot_s, point.rows * tpot_s / point.tpot_s) for point in points]
    allowed = max([allowed, *(rows for is_met, rows in bounds if is_met)])
    return max(0.5, min([allowed, *(rows for is_met, rows in bounds if not is_met)]))
