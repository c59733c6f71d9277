"""Servers, routers and requests in simulated time: no sockets, no sleeps, the same with the same seed.

A prefill server computes prompts one behind the other. Each router has its own policy and its own view of the
servers, made of their figures, which are as old as said, and of what it has sent itself.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from router.assignments import Assignments
from router.policies.policy import Candidate, Demand, Policy
from tests.router.scripted_servers import server_info, server_stats


@dataclass
class SimulatedServer:
    address: str
    tokens_per_s: float = 10_000.0
    busy_until: float = 0.0
    num_prompts: int = 0
    num_tokens: int = 0

    def queued_tokens(self, now: float) -> int:
        return int(max(0.0, self.busy_until - now) * self.tokens_per_s)

    def add(self, now: float, demand: Demand) -> float:
        """When the prompt is computed."""
        num_tokens = len(demand.token_ids)
        self.num_prompts += 1
        self.num_tokens += num_tokens
        self.busy_until = max(now, self.busy_until) + num_tokens / self.tokens_per_s
        return self.busy_until


@dataclass
class SimulatedRouter:
    policy: Policy
    known: dict[str, Assignments] = field(default_factory=dict)


class Simulation:
    """``figures_every_s``: how often routers hear of the servers' load; None: never."""

    def __init__(
        self,
        make_policy: Callable[[random.Random], Policy],
        *,
        num_servers: int = 4,
        num_routers: int = 1,
        figures_every_s: float | None = 0.25,
        seed: int = 0,
    ) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.servers: dict[str, SimulatedServer] = {}
        self.routers = [SimulatedRouter(make_policy(random.Random(seed + i + 1))) for i in range(num_routers)]
        self.waits_s: list[float] = []
        self.fullest = 0
        """Most tokens that were queued at one server."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._figures_every_s = figures_every_s
        for i in range(num_servers):
            self.join(SimulatedServer(f"server-{i}:1"))
        if figures_every_s is not None:
            for router in self.routers:  # not all at one moment
                self.at(self.rng.uniform(0, figures_every_s), lambda router=router: self._tell(router))

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), do))

    def join(self, server: SimulatedServer) -> None:
        self.servers[server.address] = server
        for router in self.routers:
            assignments = router.known[server.address] = Assignments(lambda: self.now)
            assignments.appeared(server_info("prefill"))

    def leave(self, address: str) -> SimulatedServer:
        """As a server that drains: nothing more is sent there, what it has is computed."""
        return self.servers.pop(address)

    def request(self, time_s: float, demand: Demand) -> None:
        self.at(time_s, lambda: self._send(self.rng.choice(self.routers), demand))

    def arrivals(self, *, per_s: float, seconds: float, demand: Callable[[random.Random], Demand]) -> None:
        """A Poisson stream."""
        at = self.now
        while (at := at + self.rng.expovariate(per_s)) < self.now + seconds:
            self.request(at, demand(self.rng))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now, _, do = heapq.heappop(self._events)
            do()

    def prompts(self) -> Counter[str]:
        return Counter({server.address: server.num_prompts for server in self.servers.values()})

    def _send(self, router: SimulatedRouter, demand: Demand) -> None:
        candidates = [Candidate(address, router.known[address].load()) for address in self.servers]
        address = router.policy.choose(candidates, demand).candidate.address
        server = self.servers[address]
        self.waits_s.append(max(0.0, server.busy_until - self.now))
        assignment = router.known[address].begin(len(demand.token_ids))
        done = server.add(self.now, demand)
        self.fullest = max(self.fullest, server.queued_tokens(self.now))
        self.at(done, assignment.ended)

    def _tell(self, router: SimulatedRouter) -> None:
        assert self._figures_every_s is not None
        for address, server in self.servers.items():
            known = router.known[address]
            stats = server_stats(
                queued_tokens=server.queued_tokens(self.now), num_blocks=1000, free_blocks=1000
            )
            known.reported(stats, tokens_when_asked=known.num_tokens)
        self.at(self.now + self._figures_every_s, lambda: self._tell(router))
