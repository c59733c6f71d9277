"""What an engine calls around its steps to have them checked, and what it calls when checks are off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.models.batch import Batch
from engine.request import Request
from engine.schedule.step_plan import StepPlan
from engine.step.launched_step import RowResult
from wire.errors import TwinfangError
from wire.messages.handoff import Digests


class Checks(Protocol):
    """Six points of a request's life; see :mod:`engine.sanitizer.sanitizer`.

    Faults of one request are returned, on all tensor-parallel ranks if any has found one: it has to leave on
    all. Structural ones are raised as :class:`wire.errors.SanitizerError`.
    """

    def vacated(self, plan: StepPlan) -> None:
        """What the plan preempts has been copied out; nothing was written yet to memory freed since."""

    def inspect(self, plan: StepPlan) -> list[tuple[Request, TwinfangError]]:
        """The plan is about to be computed; requests that must not be, and why."""

    def compare(self, plan: StepPlan, batch: Batch) -> None:
        """The batch was made of the plan."""

    def computed(self, plan: StepPlan, results: Sequence[RowResult]) -> None:
        """The plan's rows have been read back: tokens have joined, but requests have not moved on yet."""

    def received(self, request: Request) -> TwinfangError | None:
        """Blocks and state of the request's ticket have landed."""

    def digests(self, request: Request) -> Digests | None:
        """For the ticket of a request whose prompt is prefilled."""


class NoChecks:
    """Sanitizing is off."""

    def vacated(self, plan: StepPlan) -> None:
        pass

    def inspect(self, plan: StepPlan) -> list[tuple[Request, TwinfangError]]:
        return []

    def compare(self, plan: StepPlan, batch: Batch) -> None:
        pass

    def computed(self, plan: StepPlan, results: Sequence[RowResult]) -> None:
        pass

    def received(self, request: Request) -> TwinfangError | None:
        return None

    def digests(self, request: Request) -> Digests | None:
        return None
