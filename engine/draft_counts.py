"""How many drafts were tried and how many were right, by their position behind the newest token."""

from __future__ import annotations


class DraftCounts:
    """Since the start; position 0 is the first draft of a step."""

    def __init__(self, num_drafts: int) -> None:
        self.drafted = [0] * num_drafts
        self.accepted = [0] * num_drafts

    def count(self, num_tried: int, num_accepted: int) -> None:
        """One row of one step."""
        for position in range(num_tried):
            self.drafted[position] += 1
        for position in range(num_accepted):
            self.accepted[position] += 1
