"""The rows of a step that was read back, divided by how much there is to do for them.

Most rows of most steps are *quiet*: their answers gain tokens and nothing else happens. All quiet rows are
handled together, at a small part of what the general way takes for one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.request import Request
from engine.row_kinds import PlannedRow
from engine.stats import EngineStats
from engine.step.launched_step import RowResult, RowResults, StepDrafts
from engine.step_result import Landed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QuietRows:
    """Quiet rows, by column."""

    requests: Sequence[Request]
    accepted: Sequence[int]
    """Of all steps of a burst together."""
    steps: Sequence[StepDrafts]
    tokens: Sequence[tuple[int, ...]]

    def land(self, read_s: float, stats: EngineStats, landed: Landed) -> list[tuple[float, int]]:
        """Advance the requests, as ``Scheduler.landed`` does, and report their tokens, which came at
        ``read_s``.

        Returns the time of each request's previous tokens, and the number of its new ones.
        """
        previous = []
        num_steps = len(self.steps)
        for request, num_accepted, newest in zip(
            self.requests, self.accepted, self.steps[-1].accepted, strict=True
        ):
            request.num_in_flight -= num_steps
            request.num_planned += num_accepted - num_steps
            request.num_computed += num_accepted
            request.memory.state_index = newest - 1
            measured = request.measured
            previous.append((measured.last_token_s, num_accepted))
            measured.last_token_s = read_s
        for step in self.steps:
            stats.count_decoded(self.requests, step.num_tried, step.accepted)
        names = [request.request_id for request in self.requests]
        landed.outputs.add_all_tokens(dict(zip(names, self.tokens, strict=True)))
        return previous


def divide(
    rows: Sequence[PlannedRow], results: RowResults
) -> tuple[QuietRows, list[tuple[PlannedRow, RowResult]]]:
    """Gives requests their new tokens. Returns the quiet rows, and the other rows with their results.

    A row is left out if its request ended in an earlier step: it has no use for this step's result.
    """
    requests = [row.request for row in rows]
    accepted, tokens = results.accepted, results.tokens
    loud = [
        place
        for place, (request, count, gained) in enumerate(zip(requests, accepted, tokens, strict=True))
        if request.num_computed + count > request.quiet_until
        or gained[-1] in request.stop_token_ids
        or rows[place].boundaries
        or not results.is_finite[place]
    ]
    quiet = QuietRows(
        _without(requests, loud),
        _without(accepted, loud),
        [StepDrafts(_without(one.num_tried, loud), _without(one.accepted, loud)) for one in results.steps],
        _without(tokens, loud),
    )
    for request, gained in zip(quiet.requests, quiet.tokens, strict=True):
        request.tokens += gained
    others = [(rows[place], results[place]) for place in loud if requests[place].finish_reason is None]
    for row, result in others:
        if row.samples and result.is_finite:  # else the next token is given already
            row.request.tokens += result.tokens
    return quiet, others


def _without(column: list[T], places: list[int]) -> list[T]:
    """Returns the items that are not at the given places, which ascend."""
    if not places:
        return column
    kept = column[: places[0]]
    for before, place in zip(places, [*places[1:], len(column)], strict=True):
        kept += column[before + 1 : place]
    return kept


def previous_tokens(brought: Iterable[tuple[PlannedRow, RowResult]]) -> list[tuple[float, int]]:
    """Returns the time of each answer's previous tokens, if it has any, and the number of its new ones."""
    return [
        (row.request.measured.last_token_s, len(result.tokens))
        for row, result in brought
        if row.request.measured.first_token_s and result.is_finite and result.tokens
    ]
