"""Chooses the server that has most of a prompt cached, unless its queue costs more than the cache saves."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.least_loaded import LeastLoaded, nearest, weight
from router.policies.policy import Candidate, Decision, Demand
from router.policies.session_affinity import home_of

HOME_TOKENS = 512
"""How many tokens of a session's prompt its home is taken to have, as long as it has not said so. Servers say
what they have a few times a second, and a session's next request may come sooner."""


class PrefixAffinity:
    """Compares the server with the longest cached prefix and the server that least_loaded would choose.

    The server with the lower score is chosen. The score is the number of tokens until the prompt is done:
    the tokens that it would wait for (:func:`weight`), plus its own tokens, minus the cached ones. So popular
    prefixes spread over several servers: once the queue of the server that has a prefix is longer than the
    prefix, another server computes the prefix and then has it, too. If scores are equal, the nearer server is
    chosen.

    A session has a home, the server that draws the highest hash for its name. The home is compared as well,
    and its cache is taken to have :data:`HOME_TOKENS` of the prompt.
    """

    reads_load = True
    reads_prefixes = True

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._least_loaded = LeastLoaded(self._rng)

    def choose(self, candidates: Sequence[Candidate], demand: Demand) -> Decision:
        other = self._least_loaded.choose(candidates, demand)
        most = max(candidate.cached_tokens for candidate in candidates)
        home = home_of(demand.session_name, candidates) if demand.session_name else None
        if not most and home is None:
            return other
        num_tokens = len(demand.token_ids)
        compared = [other.candidate]
        if most:
            compared.append(
                self._rng.choice(nearest([one for one in candidates if one.cached_tokens == most]))
            )
        if home is not None:
            compared.append(home)

        def score(one: Candidate) -> tuple[int, int, float]:
            cached = one.cached_tokens
            if one is home:
                cached = max(cached, min(HOME_TOKENS, num_tokens - 1))
            waiting, fullness = weight(one.load, num_tokens - cached)
            return waiting + num_tokens - cached, one.distance, fullness

        best = min(reversed(compared), key=score)
        if best.cached_tokens:
            return Decision(best, "prefix_affinity")
        return Decision(best, "session_affinity") if best is home else other
