"""Chooses the server that has most of a prompt cached, unless its queue costs more than the cache saves."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.least_loaded import LeastLoaded, nearest, weight
from router.policies.policy import Candidate, Decision, Demand


class PrefixAffinity:
    """Compares the server with the longest cached prefix and the server that least_loaded would choose.

    The server with the lower score is chosen. The score is the number of tokens until the prompt is done:
    the tokens that it would wait for (:func:`weight`), plus its own tokens, minus the cached ones. So popular
    prefixes spread over several servers: once the queue of the server that has a prefix is longer than the
    prefix, another server computes the prefix and then has it, too. If scores are equal, the nearer server is
    chosen.
    """

    reads_load = True
    reads_prefixes = True

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._least_loaded = LeastLoaded(self._rng)

    def choose(self, candidates: Sequence[Candidate], demand: Demand) -> Decision:
        other = self._least_loaded.choose(candidates, demand)
        most = max(candidate.cached_tokens for candidate in candidates)
        if not most:
            return other
        num_tokens = len(demand.token_ids)
        holder = self._rng.choice(nearest([one for one in candidates if one.cached_tokens == most]))

        def score(one: Candidate) -> tuple[int, int, float]:
            waiting, fullness = weight(one.load, num_tokens - one.cached_tokens)
            return waiting + num_tokens - one.cached_tokens, one.distance, fullness

        best = min((holder, other.candidate), key=score)
        return Decision(best, "prefix_affinity") if best.cached_tokens else other
