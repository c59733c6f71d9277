"""Chooses the same server for all requests of a session."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from router.policies.policy import Candidate, Decision, Demand, Policy


class SessionAffinity:
    """Chooses a session's server by hash. For requests without a session, another policy decides.

    A hash of the session and of each server's address gives each server a number; the server with the highest
    number gets the session (rendezvous hashing: Thaler and Ravishankar, 1998). If a server leaves, only its
    sessions move, and they come back if the server returns. A server that joins takes its share evenly from
    all others. All routers compute the same numbers, so they agree without storing anything.
    """

    def __init__(self, others: Policy) -> None:
        self._others = others

    @property
    def reads_load(self) -> bool:
        return self._others.reads_load

    @property
    def reads_prefixes(self) -> bool:
        return self._others.reads_prefixes

    def choose(self, candidates: Sequence[Candidate], demand: Demand) -> Decision:
        session = demand.session
        if session is None:
            return self._others.choose(candidates, demand)
        return Decision(home_of(session, candidates), "session_affinity")


def home_of(session: str, candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate that draws the highest hash for a session."""
    return max(candidates, key=lambda one: _drawn(session, one.address))


def _drawn(session: str, address: str) -> bytes:
    data = session.encode(errors="surrogatepass")
    key = hashlib.blake2b(address.encode(), digest_size=16).digest()
    return hashlib.blake2b(data, digest_size=16, key=key).digest()
