"""One server for all requests of a session."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from router.policies.policy import Candidate, Decision, Demand, Policy


class SessionAffinity:
    """Sends a session where its hash points; requests without a session follow another policy.

    Each server draws a number for the session, and the highest one has it (rendezvous hashing: Thaler and
    Ravishankar, 1998). A server that leaves moves its own sessions alone, and gets them back if it returns;
    one that joins takes its share evenly from all. Nothing is stored, so all routers agree.
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
        chosen = max(candidates, key=lambda one: _drawn(session, one.address))
        return Decision(chosen, "session_affinity")


def _drawn(session: str, address: str) -> bytes:
    data = session.encode(errors="surrogatepass")
    key = hashlib.blake2b(address.encode(), digest_size=16).digest()
    return hashlib.blake2b(data, digest_size=16, key=key).digest()
