"""The checks that an engine calls before and after its steps, and the object that does nothing instead."""

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
    """Checks at six points of a request's life; see :mod:`engine.sanitizer.sanitizer`.

    A fault of one request is returned. If one tensor-parallel rank finds it, all ranks return it, because the
    request must leave on all ranks. A fault in memory that several requests may use is *structural*. It
    raises :class:`wire.errors.SanitizerError`.
    """

    def vacated(self, plan: StepPlan) -> None:
        """Check the pools when preempted requests and evicted prefixes have been copied to host memory.

        The memory that they freed is not written yet.
        """

    def inspect(self, plan: StepPlan) -> list[tuple[Request, TwinfangError]]:
        """Check a plan before it is computed. Returns the requests that must not be computed, and why."""

    def compare(self, plan: StepPlan, batch: Batch) -> None:
        """Check the batch that was made from the plan."""

    def computed(self, plan: StepPlan, results: Sequence[RowResult]) -> None:
        """Check the plan's rows after they were read back.

        The requests have their new tokens, but the scheduler has not advanced their progress yet.
        """

    def received(self, request: Request) -> TwinfangError | None:
        """Check the blocks and the state of the request's ticket after they were read."""

    def digests(self, request: Request) -> Digests | None:
        """Return digests for the ticket of a prefilled request."""


class NoChecks:
    """The checks when the sanitizer is off: none."""

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
