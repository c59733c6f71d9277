"""Time between the tokens of answers, as steps bring them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.launched_step import RowResult
from engine.rows import PlannedRow
from telemetry.measures import Measures


def measure_gaps(measures: Measures, read_s: float, brought: Iterable[tuple[PlannedRow, RowResult]]) -> None:
    """Time from each answer's last tokens to ``read_s``, when a step's were read; most rows share it."""
    gaps = Counter(
        [
            (row.request.last_token_s, len(result.tokens))
            for row, result in brought
            if row.request.first_token_s and result.is_finite and result.tokens
        ]
    )
    for (last_s, num_tokens), num_rows in gaps.items():
        gap_s = (read_s - last_s) / num_tokens
        measures.inter_token_latency.add(gap_s, num_tokens * num_rows)
