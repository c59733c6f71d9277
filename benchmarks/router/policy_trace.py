"""Requests with shared beginnings, as a service gets them over some minutes; the same for the same seed.

| kind | share | prompt |
|---|---|---|
| chat | 1/2 | one of three system prompts, all turns so far, a new question; next turns follow as typed |
| document | 3/10 | a system prompt, one of 80 documents (few of them popular), a question |
| single | 1/5 | nothing that another request has |

Three times all users ask about one new document at once. Arrivals come in bursts throughout.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

from router.policies.policy import Demand

Tokens = tuple[int, ...]

VOCAB_SIZE = 100_000
SYSTEM_PROMPT_LENS = (300, 800, 1600)
NUM_DOCUMENTS = 80
CALM_S, BURST_S = 12.0, 3.0
BURST_FACTOR = 3.0
"""Ratio of the arrival rate in a burst to that in calm times."""
HOT_AT = (0.25, 0.5, 0.75)
"""Positions in the trace at which all users ask about one document."""
HOT_REQUESTS, HOT_S = 40, 2.0


@dataclass(frozen=True)
class Arrival:
    at_s: float
    kind: str
    demand: Demand


class Trace:
    """A trace. ``per_s``: conversations, questions about documents and single prompts that begin per second,
    on average."""

    def __init__(self, *, per_s: float, seconds: float, seed: int) -> None:
        self._rng = random.Random(seed)
        self._seconds = seconds
        self._systems = [self._tokens(n) for n in SYSTEM_PROMPT_LENS]
        self._documents = [self._tokens(self._rng.randint(1000, 5000)) for _ in range(NUM_DOCUMENTS)]
        self._popularity = list(accumulate(1 / (rank + 1) for rank in range(NUM_DOCUMENTS)))
        self._num_sessions = 0
        self.arrivals: list[Arrival] = []
        self._fill(per_s)
        self.arrivals = sorted((a for a in self.arrivals if a.at_s < seconds), key=lambda a: a.at_s)

    @property
    def num_tokens(self) -> int:
        return sum(len(arrival.demand.token_ids) for arrival in self.arrivals)

    def _fill(self, per_s: float) -> None:
        calm_per_s = per_s * (CALM_S + BURST_S) / (CALM_S + BURST_S * BURST_FACTOR)
        at = 0.0
        while at < self._seconds:
            in_burst = at % (CALM_S + BURST_S) >= CALM_S
            at += self._rng.expovariate(calm_per_s * (BURST_FACTOR if in_burst else 1.0))
            kind = self._rng.random()
            if kind < 0.5:
                self._chat(at)
            elif kind < 0.8:
                document = self._rng.choices(self._documents, cum_weights=self._popularity)[0]
                self._question(at, document, "document")
            else:
                self._add(at, "single", self._tokens(self._rng.randint(100, 3000)), self._session())
        for share in HOT_AT:
            document = self._tokens(3000)
            for _ in range(HOT_REQUESTS):
                at = share * self._seconds + self._rng.uniform(0, HOT_S)
                self._question(at, document, "hot document")

    def _chat(self, at: float) -> None:
        session = self._session()
        said = self._rng.choices(self._systems, weights=(5, 3, 1))[0]
        for _ in range(1 + min(9, int(self._rng.expovariate(1 / 3)))):
            said += self._tokens(int(self._rng.lognormvariate(4.0, 1.0)) + 5)
            self._add(at, "chat", said, session)
            answer = self._tokens(self._rng.randint(50, 400))
            said += answer
            at += 0.02 * len(answer) + self._rng.expovariate(1 / 8)  # it is written, read and answered

    def _question(self, at: float, document: Tokens, kind: str) -> None:
        self._add(at, kind, self._systems[1] + document + self._tokens(40), self._session())

    def _add(self, at: float, kind: str, token_ids: Tokens, session: str) -> None:
        self.arrivals.append(Arrival(at, kind, Demand(token_ids, session=session)))

    def _session(self) -> str:
        self._num_sessions += 1
        return f"session-{self._num_sessions}"

    def _tokens(self, num: int) -> Tokens:
        return tuple(self._rng.choices(range(VOCAB_SIZE), k=num))
