"""Servers in turn."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.policy import Candidate, Decision, Demand


class RoundRobin:
    """Takes candidates in turn; servers that come and go only shift whose turn it is."""

    reads_load = False
    reads_prefixes = False

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Sequence[Candidate], demand: Demand) -> Decision:
        chosen = candidates[self._turn % len(candidates)]
        self._turn += 1
        return Decision(chosen, "round_robin")
