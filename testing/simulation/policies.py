"""Servers, routers and requests in simulated time: no sockets, no sleeps, the same result for the same seed.

A prefill server computes prompts one after the other. Each router has its own policy and its own view of the
servers: their stats, which have a given age, and the router's own requests. Servers may have a prefix cache
of a given size, from which a prompt can continue at every block's end.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields

from engine.memory.prefix_journal import PrefixJournal
from router.policies.policy import Demand, Policy
from testing.simulation.time import SimulatedRouter, SimulatedTime
from wire.messages.generation import ServerInfo, ServerStats
from wire.messages.prefixes import block_keys

BLOCK_SIZE = 64
INFO = ServerInfo(
    role="prefill",
    incarnation="simulated",
    served_model_name="simulated",
    fingerprint="f",
    vocab_size=1 << 17,
    max_model_len=1 << 20,
    block_size=BLOCK_SIZE,
    max_num_seqs=64,
    eos_token_ids=(),
)


@dataclass
class SimulatedServer:
    address: str
    tokens_per_s: float = 10_000.0
    busy_until: float = 0.0
    num_prompts: int = 0
    num_tokens: int = 0
    num_cached: int = 0
    cache_blocks: int = 0
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    journal: PrefixJournal = field(default_factory=PrefixJournal)

    def queued_tokens(self, now: float) -> int:
        return int(max(0.0, self.busy_until - now) * self.tokens_per_s)

    def add(self, now: float, demand: Demand) -> float:
        """Adds a prompt; returns when it is computed."""
        num_tokens = len(demand.token_ids)
        num_cached = self._look_up(demand) if self.cache_blocks else 0
        self.num_prompts += 1
        self.num_tokens += num_tokens
        self.num_cached += num_cached
        self.busy_until = max(now, self.busy_until) + (num_tokens - num_cached) / self.tokens_per_s
        return self.busy_until

    def _look_up(self, demand: Demand) -> int:
        """Returns the number of cached tokens. Afterwards the cache holds all full blocks of the prompt."""
        tokens = demand.token_ids[:-1]
        keys = block_keys(tokens, block_size=BLOCK_SIZE, fingerprint="f", salt=demand.cache_salt)
        num_hits = next((i + 1 for i in range(len(keys) - 1, -1, -1) if keys[i] in self.cache), 0)
        for key in reversed(keys):  # leaves are evicted first
            if key not in self.cache:
                self.journal.add(key)
            self.cache[key] = None
            self.cache.move_to_end(key)
        while len(self.cache) > self.cache_blocks:
            self.journal.remove(self.cache.popitem(last=False)[0])
        return num_hits * BLOCK_SIZE


class Simulation(SimulatedTime):
    """A simulation. ``figures_every_s``: interval at which routers get the servers' load; None: never."""

    def __init__(
        self,
        make_policy: Callable[[random.Random], Policy],
        *,
        num_servers: int = 4,
        num_routers: int = 1,
        cache_blocks: int = 0,
        figures_every_s: float | None = 0.25,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.servers: dict[str, SimulatedServer] = {}
        self.routers = [
            SimulatedRouter(make_policy(random.Random(seed + i + 1)), self) for i in range(num_routers)
        ]
        self.waits_s: list[float] = []
        self.ttfts_s: list[float] = []
        """Wait and prefill of each request, in the order of their arrival."""
        self.fullest = 0
        """Maximum number of tokens that were queued at one server at a time."""
        self._figures_every_s = figures_every_s
        for i in range(num_servers):
            self.join(SimulatedServer(f"server-{i}:1", cache_blocks=cache_blocks))
        if figures_every_s is not None:
            for router in self.routers:  # not all at one moment
                self.at(self.rng.uniform(0, figures_every_s), lambda router=router: self._tell(router))

    def join(self, server: SimulatedServer) -> None:
        self.servers[server.address] = server
        for router in self.routers:
            router.join(server.address, INFO)

    def leave(self, address: str) -> SimulatedServer:
        """Drains a server: it gets no more requests, but computes those that it has."""
        return self.servers.pop(address)

    def request(self, time_s: float, demand: Demand) -> None:
        self.at(time_s, lambda: self._send(self.rng.choice(self.routers), demand))

    def arrivals(self, *, per_s: float, seconds: float, demand: Callable[[random.Random], Demand]) -> None:
        """Adds a Poisson stream of requests."""
        at = self.now
        while (at := at + self.rng.expovariate(per_s)) < self.now + seconds:
            self.request(at, demand(self.rng))

    @property
    def hit_rate(self) -> float:
        """Returns the share of all prompt tokens that a cache had."""
        servers = self.servers.values()
        return sum(one.num_cached for one in servers) / sum(one.num_tokens for one in servers)

    def prompts(self) -> Counter[str]:
        return Counter({server.address: server.num_prompts for server in self.servers.values()})

    def _send(self, router: SimulatedRouter, demand: Demand) -> None:
        address = router.choose(self.servers, demand)
        server = self.servers[address]
        self.waits_s.append(max(0.0, server.busy_until - self.now))
        known = router.known[address]
        assignment = known.begin(len(demand.token_ids) - known.prefixes.cached_tokens(demand))
        done = server.add(self.now, demand)
        self.ttfts_s.append(done - self.now)
        self.fullest = max(self.fullest, server.queued_tokens(self.now))
        self.at(done, assignment.ended)

    def _tell(self, router: SimulatedRouter) -> None:
        assert self._figures_every_s is not None
        for address, server in self.servers.items():
            known = router.known[address]
            stats = _stats(server.queued_tokens(self.now))
            known.reported(stats, tokens_when_asked=known.num_tokens)
            known.prefixes.update(server.journal.news(known.prefixes.version))
        self.at(self.now + self._figures_every_s, lambda: self._tell(router))


def _stats(queued_tokens: int) -> ServerStats:
    """Returns stats of a server that does not lack blocks."""
    zeros = {f.name: 0 for f in fields(ServerStats) if f.default is MISSING and f.default_factory is MISSING}
    figures = zeros | {"queued_tokens": queued_tokens, "num_blocks": 1000, "free_blocks": 1000}
    return ServerStats(**figures)  # type: ignore[arg-type]
