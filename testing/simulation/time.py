"""Simulated time, and routers in it: the real policies and bookkeeping, no sockets, no sleeps."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count

from router.fleet.links.assignments import Assignments
from router.policies.policy import Candidate, Demand, Policy
from wire.messages.generation import ServerInfo


class SimulatedTime:
    """Runs events in order of time; events of one moment run in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), do))

    def run(self, until_s: float = math.inf) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now, _, do = heapq.heappop(self._events)
            do()


@dataclass
class SimulatedRouter:
    policy: Policy
    time: SimulatedTime
    known: dict[str, Assignments] = field(default_factory=dict)

    def join(self, address: str, info: ServerInfo) -> None:
        assignments = self.known[address] = Assignments(lambda: self.time.now)
        assignments.appeared(info)

    def choose(self, addresses: Collection[str], demand: Demand) -> str:
        """Returns the address that the policy chooses among ``addresses``."""
        candidates = [
            Candidate(address, known.load(), known.prefixes.cached_tokens(demand))
            for address, known in self.known.items()
            if address in addresses
        ]
        return self.policy.choose(candidates, demand).candidate.address
