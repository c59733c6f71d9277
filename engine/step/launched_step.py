"""A launched step. The copy of its results to the host is queued after it, and the host reads them later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.memory.async_copy import Download, upload
from engine.request import Request
from engine.row_kinds import PlannedRow
from engine.sampling.logprobs import (
    ComputesLogits,
    LogprobCopy,
    LogprobTensors,
    PromptLogprobs,
    prompt_logprobs,
)
from engine.schedule.step_plan import StepPlan
from engine.step.program import Step, StepTensors
from engine.step.row_progress import RowState
from telemetry.engine_metrics import Measures, StepKind, StepRun
from wire.messages.generation import TokenLogprobs

RESULT_COLUMNS = 3
"""Number of result columns before the gained tokens: accepted, finite, drafts tried."""


class RowResult(NamedTuple):
    """The result of one row.

    Like :class:`engine.row_kinds.PlannedRow` it is a named tuple, because a dataclass takes longer to create.
    """

    accepted: int
    """Number of positions with valid tokens, in all steps of a burst; 0 if the row had reached its end
    before."""
    is_finite: bool
    steps: tuple[tuple[int, int], ...]
    """For each step, the number of drafts that were tried, and of positions with valid tokens."""
    tokens: tuple[int, ...]
    """The gained tokens, ``accepted`` of them."""
    logprobs: tuple[TokenLogprobs, ...] | None
    drafts: tuple[int, ...] = ()
    """The drafts that the row's next step tries; known only for rows whose answers follow a grammar."""

    @property
    def newest(self) -> int:
        """The number of positions with valid tokens in the last step that had any: the last of them holds the
        newest state."""
        return next((accepted for _, accepted in reversed(self.steps) if accepted), 0)


@dataclass(frozen=True)
class StepDrafts:
    """What one step of a burst tried and accepted, by row."""

    num_tried: list[int]
    accepted: list[int]


@dataclass(frozen=True)
class RowResults(Sequence[RowResult]):
    """The results of a step's rows, or of a burst's, by column. Results of single rows are made only for
    those who ask."""

    accepted: list[int]
    """Of all steps together."""
    is_finite: list[int]
    steps: list[StepDrafts]
    tokens: list[tuple[int, ...]]
    logprobs: dict[int, list[TokenLogprobs]]
    """At all positions, by row."""
    drafts: list[list[int]] | None
    """``[rows, 1 + k]``: the number of drafts, and the drafts; None if no row follows a grammar."""

    @classmethod
    def of(
        cls,
        results: Sequence[NDArray[np.int64]],
        logprobs: dict[int, list[TokenLogprobs]],
        drafts: NDArray[np.int64] | None,
    ) -> RowResults:
        """Take apart the ``[rows, T + 3]`` results of each step. Numpy's ``tolist`` takes a tenth of torch's
        time."""
        first, *more = (_one_step(result) for result in results)
        accepted, is_finite, steps, tokens = first.accepted, first.is_finite, [*first.steps], first.tokens
        for one in more:
            accepted = [*map(add, accepted, one.accepted)]
            # A row that ended before this step has zeros.
            ended = [not count for count in one.accepted]
            is_finite = [
                before and (now or over)
                for before, now, over in zip(is_finite, one.is_finite, ended, strict=True)
            ]
            tokens = [*map(add, tokens, one.tokens)]
            steps += one.steps
        return cls(accepted, is_finite, steps, tokens, logprobs, None if drafts is None else drafts.tolist())

    def __len__(self) -> int:
        return len(self.accepted)

    @overload
    def __getitem__(self, i: int) -> RowResult: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[RowResult]: ...
    def __getitem__(self, i: int | slice) -> RowResult | Sequence[RowResult]:
        if isinstance(i, slice):
            return [self[place] for place in range(*i.indices(len(self)))]
        accepted, is_finite = self.accepted[i], bool(self.is_finite[i])
        reports = i in self.logprobs and is_finite and accepted
        num_drafts, *guessed = [0] if self.drafts is None else self.drafts[i]
        return RowResult(
            accepted,
            is_finite,
            tuple((step.num_tried[i], step.accepted[i]) for step in self.steps),
            self.tokens[i],
            tuple(self.logprobs[i][:accepted]) if reports else None,
            tuple(guessed[:num_drafts]),
        )


def _one_step(results: NDArray[np.int64]) -> RowResults:
    accepted, is_finite, num_tried, *gained = results.T.tolist()
    tokens = [row[:count] for row, count in zip(zip(*gained, strict=True), accepted, strict=True)]
    return RowResults(accepted, is_finite, [StepDrafts(num_tried, accepted)], tokens, {}, None)


@dataclass(frozen=True)
class LaunchedStep:
    """A launched step, or a burst of them (:mod:`engine.step.burst`). Only :meth:`read` waits for the device.
    Later steps may be launched before that."""

    plan: StepPlan
    launched_s: float
    run: StepRun
    _results: Sequence[Download]
    """Each has ``[steps, rows, T + 3]`` of one or more steps."""
    _drafts: Download | None
    _logprobs: list[RowLogprobs]
    _prompt_logprobs: list[tuple[Request, PromptLogprobs]]

    @classmethod
    def follow(
        cls,
        plan: StepPlan,
        step: Step,
        tensors: StepTensors,
        model: ComputesLogits,
        state: RowState,
        *,
        launched_s: float,
        run: StepRun,
        reporting: Collection[int],
        results: Sequence[Download],
    ) -> LaunchedStep:
        """Queue the copy to the host after the step. ``reporting``: rows that want log-probabilities.
        ``results``: ``[steps, rows, T + 3]`` of each of the burst's steps, or of several together."""
        return cls(
            plan,
            launched_s,
            run,
            results,
            _next_drafts(plan, step, state),
            _logprobs(plan, step, tensors) if reporting else [],
            _score_prompts(plan.rows, step, tensors.hidden, model) if reporting else [],
        )

    @property
    def num_steps(self) -> int:
        return sum(len(results.host) for results in self._results)

    @property
    def is_followed(self) -> bool:
        """Whether the step brings tokens that a grammar follows."""
        return any(row.request.follower is not None and row.samples for row in self.plan.rows)

    def count_in(self, measures: Measures, now: float) -> None:
        """Count this step in ``measures``. ``now`` is the time at which it was read back."""
        num_decode, prefill_rows = len(self.plan.decode_rows), self.plan.prefill_rows
        kind: StepKind = "mixed" if num_decode else "prefill"
        measures.stepped(
            kind if prefill_rows else "decode",
            self.run,
            num_rows=num_decode + len(prefill_rows),
            num_tokens=num_decode + sum(row.num_new for row in prefill_rows),
            num_steps=self.num_steps,
            launched_s=self.launched_s,
            now=now,
        )

    def read(self) -> RowResults:
        """Wait until the device has run the step, and return one result for each of the plan's rows."""
        found = [one for results in self._results for one in results.wait().numpy()]
        for request, scored in self._prompt_logprobs:
            request.prompt_logprobs += scored.read()
        reported: dict[int, list[TokenLogprobs]] = {}
        for group in self._logprobs:
            reported |= group.read()
        return RowResults.of(found, reported, None if self._drafts is None else self._drafts.wait().numpy())


def _next_drafts(plan: StepPlan, step: Step, state: RowState) -> Download | None:
    """Queue the copy of ``[rows, 1 + k]``, number of drafts and drafts; None if no row follows a grammar."""
    if state.tokens.shape[1] == 1 or all(row.request.follower is None for row in plan.eventful_rows):
        return None
    rows = step.rows[: len(plan.rows)]
    return Download(torch.cat([state.num_drafts[rows, None].to(torch.int64), state.tokens[rows, 1:]], dim=1))


def measure_gaps(measures: Measures, read_s: float, previous: Iterable[tuple[float, int]]) -> None:
    """Measure the time from each answer's previous tokens to ``read_s``, when this step's tokens were read.

    ``previous`` has this time and the number of the step's tokens for each answer. Most answers have the same
    time and number. Such answers are counted together.
    """
    for (last_s, num_tokens), num_rows in Counter(previous).items():
        measures.inter_token_latency.add((read_s - last_s) / num_tokens, num_tokens * num_rows)


@dataclass(frozen=True)
class RowLogprobs:
    """Log-probabilities of all rows that report the same number of alternatives.

    They are computed together, because the kernels take as long for one row as for sixty-four.
    """

    rows: list[int]
    """The rows' places in the plan."""
    copy: LogprobCopy

    def read(self) -> dict[int, list[TokenLogprobs]]:
        """Return log-probabilities at all positions of each row, by the row's place in the plan."""
        found = self.copy.read()
        num_positions = len(found) // len(self.rows)
        return {row: found[i * num_positions : (i + 1) * num_positions] for i, row in enumerate(self.rows)}


def _logprobs(plan: StepPlan, step: Step, tensors: StepTensors) -> list[RowLogprobs]:
    """Compute log-probabilities of the reporting rows at all positions.

    The host does not know yet which positions are accepted.
    """
    decode = _reporting([(i, i, row) for i, row in enumerate(plan.decode_rows)])
    sampling = [(i, row) for i, row in enumerate(plan.prefill_rows, len(plan.decode_rows)) if row.samples]
    prefill = _reporting([(i, place, row) for place, (i, row) in enumerate(sampling)])
    found = []
    for logits, groups in ((tensors.decode_logits, decode), (tensors.prefill_logits, prefill)):
        if logits is None:
            continue
        for num_top, places in groups.items():
            rows = [i for i, _ in places]
            of_rows = logits.index_select(0, upload(np.array([place for _, place in places]), logits.device))
            results = step.results.index_select(0, upload(np.array(rows), logits.device))
            token_ids = results[:, RESULT_COLUMNS : RESULT_COLUMNS + of_rows.shape[1]]
            computed = LogprobTensors.compute(of_rows.flatten(0, 1), token_ids.flatten(), num_top)
            found.append(RowLogprobs(rows, computed.start_copy()))
    return found


def _reporting(rows: list[tuple[int, int, PlannedRow]]) -> dict[int, list[tuple[int, int]]]:
    """Return the reporting rows' places in the plan and among the logits.

    The rows are grouped by the number of alternatives that they report.
    """
    groups: dict[int, list[tuple[int, int]]] = {}
    for i, place, row in rows:
        params = row.request.params
        if row.samples and params is not None and params.logprobs is not None:
            groups.setdefault(params.logprobs, []).append((i, place))
    return groups


def scores_prompt(rows: Iterable[PlannedRow]) -> bool:
    """Return whether log-probabilities of some row's prompt follow from the step."""
    return any(
        row.request.prompt_logprobs_wanted is not None and row.num_before < row.request.num_prompt - 1
        for row in rows
    )


def _score_prompts(
    rows: Sequence[PlannedRow], step: Step, hidden: Tensor | None, model: ComputesLogits
) -> list[tuple[Request, PromptLogprobs]]:
    """Compute log-probabilities of the prompt's tokens, for the rows that ask for them."""
    scored: list[tuple[Request, PromptLogprobs]] = []
    start = 0
    for row in rows:
        request = row.request
        if request.prompt_logprobs_wanted is not None and scores_prompt([row]):
            assert hidden is not None, "no graph runs a step that scores a prompt"
            targets = request.tokens[row.num_before + 1 : row.end + 1]
            targets = targets[: request.num_prompt - 1 - row.num_before]
            part = hidden[start : start + len(targets)]
            scored.append((request, prompt_logprobs(model, part, targets, request.prompt_logprobs_wanted)))
        start += step.write_slots.shape[1] if row.is_decode else row.num_new
    return scored
