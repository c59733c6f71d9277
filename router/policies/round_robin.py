"""Chooses servers in turn."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.policy import Candidate, Decision, Demand


class RoundRobin:
    """Takes candidates in turn. When servers join or leave, it only changes which server is next."""

    reads_load = False
    reads_prefixes = False

    def __init__(self, first_turn: int | None = None) -> None:
        """By default, start with a random server, so that routers that start together don't all begin with
        the same server."""
        self._turn = random.randrange(1 << 16) if first_turn is None else first_turn

    def choose(self, candidates: Sequence[Candidate], demand: Demand) -> Decision:
        chosen = candidates[self._turn % len(candidates)]
        self._turn += 1
        return Decision(chosen, "round_robin")
