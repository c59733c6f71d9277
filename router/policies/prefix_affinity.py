"""Where most of a prompt is cached, unless that server has more to do than the cache saves."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.least_loaded import LeastLoaded, weight
from router.policies.policy import Candidate, Decision, Demand


class PrefixAffinity:
    """Compares the server with the longest cached prefix with the one that least_loaded would take.

    The score is in tokens to be computed before the prompt is: those queued and the prompt's own, less what
    is cached. A prefix that many ask for spreads that way: once its server has more in its queue than the
    prefix is long, another one computes it and has it too.
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
        holder = self._rng.choice([one for one in candidates if one.cached_tokens == most])

        def score(one: Candidate) -> tuple[int, float]:
            waiting, fullness = weight(one.load, num_tokens - one.cached_tokens)
            return waiting + num_tokens - one.cached_tokens, fullness

        best = min((holder, other.candidate), key=score)
        return Decision(best, "prefix_affinity") if best.cached_tokens else other
