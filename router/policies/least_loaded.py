"""Chooses the less loaded of two servers drawn at random.

Several routers may use the same servers, so what one router knows of their load is always a little old. If
each router chose the least loaded of all servers, all routers would send to the same server until they learn
of its new load. If each chooses from two servers drawn at random, the load of the fullest of n servers
exceeds the mean by only about log log n (Mitzenmacher, "The Power of Two Choices in Randomized Load
Balancing", 2001).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.policy import Candidate, Decision, Demand, Load


class LeastLoaded:
    """Compares, for each server, the queued tokens plus the request's tokens for which no block is free. If
    these sums are equal, the server with the larger part of its blocks free is chosen."""

    reads_load = True
    reads_prefixes = False

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def choose(self, candidates: Sequence[Candidate], demand: Demand) -> Decision:
        drawn = self._rng.sample(candidates, min(2, len(candidates)))
        num_tokens = len(demand.token_ids)
        return Decision(min(drawn, key=lambda one: weight(one.load, num_tokens)), "least_loaded")


def weight(load: Load, num_tokens: int) -> tuple[int, float]:
    """Return how bad a server is for a request of ``num_tokens``: first the number of tokens that the request
    would wait for, then how full the server is."""
    missing = max(0, num_tokens - load.free_tokens)
    return load.queued_tokens + missing, -load.free_tokens / max(1, load.total_tokens)
