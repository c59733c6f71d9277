"""How the time between tokens depends on the rows of a decode step, estimated from measured points.

Does no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

ROW_SHARE = 0.5
"""Assumed time that a row adds to a step, as a share of the step's fixed part. It is used while too little
was measured."""
SPREAD = 1.3
"""Row numbers must differ by this factor before a line is fitted."""


@dataclass(frozen=True)
class TpotPoint:
    """One measurement of decode servers: rows of their steps, and the TPOT that the objective's share of
    tokens did not exceed."""

    rows: float
    tpot_s: float


@dataclass(frozen=True)
class StepLine:
    """A step's time: a fixed part plus a part for each row."""

    fixed_s: float
    row_s: float
    is_guess: bool = False
    """Whether the row numbers differed too little for a fit."""

    def at(self, rows: float) -> float:
        return self.fixed_s + self.row_s * rows

    def servers_each(self, rows: float, most_rows: float) -> float:
        """Returns how many servers each request that runs now needs, if servers are to run ``most_rows`` rows
        on average. Now they run ``rows`` rows.

        The tokens per second of all servers together must stay the same. With fewer servers, steps have more
        rows and take longer, so more requests run at a time. A guessed line is trusted only for shrinking: it
        must not promise that with more servers fewer requests run in total.
        """
        tokens_per_s = 1 / self.at(max(rows, 1.0))  # each step has at least one row
        found = tokens_per_s * self.at(max(most_rows, 1.0)) / most_rows
        return max(found, 1 / most_rows) if self.is_guess else found


def step_line(points: Sequence[TpotPoint]) -> StepLine | None:
    """Fits a line by least squares if row numbers differ; otherwise guesses a steep line through the newest
    point. Returns None if nothing was measured."""
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
    """Returns the maximum number of rows of a step with which the objective ``tpot_s`` is met; infinite if no
    point sets a limit.

    Each point of r rows and time t bounds the result, whatever the line says: if the point meets the
    objective, the result is at least ``r * tpot_s / t`` rows; otherwise it is at most this number.
    """
    line = step_line(points)
    if line is None:
        return math.inf
    allowed = (tpot_s - line.fixed_s) / line.row_s if line.row_s else math.inf
    bounds = [(point.tpot_s <= tpot_s, point.rows * tpot_s / point.tpot_s) for point in points]
    allowed = max([allowed, *(rows for is_met, rows in bounds if is_met)])
    return max(0.5, min([allowed, *(rows for is_met, rows in bounds if not is_met)]))
