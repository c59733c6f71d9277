"""Carries out what routers ask for a session, between two steps: decides, and copies at once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.schedule.ownership import Ownership
from engine.schedule.step_plan import StepPlan
from engine.step.checks import Checks
from wire.messages.sessions import SessionNews, TendSession


class SessionCalls:
    """Tends the sessions of one engine. ``move`` carries out the copies of a plan."""

    def __init__(self, owned: Ownership, checks: Checks, move: Callable[[StepPlan], None]) -> None:
        self._owned = owned
        self._checks = checks
        self._move = move

    @torch.inference_mode()
    def tend(self, call: TendSession) -> SessionNews:
        """Carries out a call. No request holds what it brings to the device, so its copies can't wait for the
        next step's plan, which may give the same memory to a request."""
        news = self._owned.sessions.tend(call)
        plan = StepPlan([], [], host_copies=self._owned.cache.tier.take())
        self._owned.files.note()
        self._move(plan)
        self._checks.came_back(plan.host_copies)
        return news
