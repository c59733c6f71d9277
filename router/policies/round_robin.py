"""Servers in turn."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.policy import Candidate, Decision, Demand


class RoundRobin:
    """Takes candidates in turn; servers that come and go only shift whose turn it is."""

    reads_load = False
    reads_prefixes = False

    def __init__(self, first_turn: int | None = None) -> None:
        """Starts anywhere by default: of many routers that start together not all begin with one server."""
        self._turn = random.randrange(1 << 16) if first_turn is None else first_turn

    def choose(self, candidates: Sequence[Candidate], demand: Demand) -> Decision:
        chosen = candidates[self._turn % len(candidates)]
        self._turn += 1
        return Decision(chosen, "round_robin")
