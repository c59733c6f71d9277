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
    these sums are equal, the nearer server is chosen; of two equally near ones, the server with the larger
    part of its blocks free.

    If some servers are nearer than others, one of the nearest is compared as well: otherwise the two that are
    drawn would rarely be near ones.
    """

    reads_load = True
    reads_prefixes = False

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def choose(self, candidates: Sequence[Candidate], demand: Demand) -> Decision:
        drawn = self._rng.sample(candidates, min(2, len(candidates)))
        near = nearest(candidates)
        if len(near) < len(candidates):
            drawn.append(self._rng.choice(near))
        num_tokens = len(demand.token_ids)

        def score(one: Candidate) -> tuple[int, int, float]:
            waiting, fullness = weight(one.load, num_tokens)
            return waiting, one.distance, fullness

        return Decision(min(drawn, key=score), "least_loaded")


def nearest(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Return the candidates with the smallest distance."""
    distance = min(one.distance for one in candidates)
    return [one for one in candidates if one.distance == distance]


def weight(load: Load, num_tokens: int) -> tuple[int, float]:
    """Return how bad a server is for a request of ``num_tokens``: first the number of tokens that the request
    would wait for, then how full the server is."""
    missing = max(0, num_tokens - load.free_tokens)
    return load.queued_tokens + missing, -load.free_tokens / max(1, load.total_tokens)
