"""Carries out what routers ask for a session, and what other servers want to read, between two steps: it
decides, and copies at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.files.lending import Lending, Loan
from engine.schedule.ownership import Ownership
from engine.schedule.step_plan import StepPlan
from engine.step.checks import Checks
from telemetry.engine_metrics import NeighbourFailure
from wire.messages.sessions import SessionNews, TendSession


class SessionCalls:
    """Tends the sessions of one engine, and lends its starts. ``move`` carries out the copies of a plan."""

    def __init__(self, owned: Ownership, checks: Checks, move: Callable[[StepPlan], None]) -> None:
        self._owned = owned
        self._checks = checks
        self._move = move
        self._lending = Lending(owned.cache, owned.files.neighbour_figures)
        self.end_loan = self._lending.end

    @torch.inference_mode()
    def tend(self, call: TendSession) -> SessionNews:
        """Carries out a call. No request holds what it brings to the device, so its copies can't wait for the
        next step's plan, which may give the same memory to a request."""
        news = self._owned.sessions.tend(call)
        self._copy()
        return news

    @torch.inference_mode()
    def lend(self, borrower: str, key: bytes, num_blocks: int) -> Loan | NeighbourFailure:
        """Lends another server a start, until ``end_loan``; or says why not."""
        loan = self._lending.lend(borrower, key, num_blocks)
        self._copy()
        return loan

    def most_valuable(self) -> list[tuple[bytes, ...]]:
        """Returns the keys of the starts that another server should have when this one leaves, best first."""
        return self._lending.most_valuable()

    def _copy(self) -> None:
        plan = StepPlan([], [], host_copies=self._owned.cache.tier.take())
        self._owned.files.note()
        self._move(plan)
        self._checks.came_back(plan.host_copies)
