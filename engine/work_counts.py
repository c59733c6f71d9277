"""How many steps, tokens and drafts an engine has computed."""

from __future__ import annotations

from engine.draft_counts import DraftCounts
from engine.launched_step import RowResult
from engine.rows import PlannedRow


class WorkCounts:
    """Since the start. ``num_drafts``: the most that a row tries in a step."""

    def __init__(self, num_drafts: int) -> None:
        self.num_steps = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.drafts = DraftCounts(num_drafts)

    def count(self, row: PlannedRow, result: RowResult) -> None:
        """One row of one step; the request's own drafts are counted as well."""
        if row.num_before < row.request.num_given:
            self.prefill_tokens += row.num_new
        if row.samples:
            self.decode_tokens += result.accepted
            if result.num_tried:
                self.drafts.count(result.num_tried, result.accepted - 1)
                row.request.num_drafted += result.num_tried
                row.request.num_accepted += result.accepted - 1
