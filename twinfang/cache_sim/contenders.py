"""The caches that a simulation compares.

| name | gives up | keeps states | memory |
|---|---|---|---|
| `lru` | the least recently used | every `--state-block-size` tokens, at ends, at branches | two pools |
| `value` | the least value per byte | as `lru` | one budget |
| `value+placement` | the least value per byte | where requests are expected to start | one budget |
| `served` | the least value per byte | where requests are expected to start | two pools |
| `marconi` | as Marconi's paper says | as Marconi's paper says | one budget |
| `clairvoyant` | knows the future | knows the future | one budget |

The share of memory that two pools have for states is the best of :data:`STATE_SHARES` for the log: a better
choice than an operator can make in advance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.memory.eviction import EvictionPolicy, LruEviction
from engine.memory.start_sizes import StartSizes
from engine.memory.state_placement import StatePlacement
from engine.memory.value_eviction import ValueEviction
from engine.schedule.cache_modes import StateBlocks
from twinfang.cache_sim.budget import Pools
from twinfang.cache_sim.clairvoyant import ClairvoyantEviction, ClairvoyantPlacement, Future
from twinfang.cache_sim.marconi import ALPHAS, BOOTSTRAP_FACTOR, MAX_BOOTSTRAP, MarconiEviction
from twinfang.cache_sim.placements import FixedPlacement, JudiciousPlacement, Placement
from twinfang.cache_sim.replay import Hardware, Outcome, SimulatedCache
from twinfang.cache_sim.trace import TracedRequest

STATE_SHARES = (0.25, 0.5, 0.75, 0.9)


@dataclass(frozen=True)
class Question:
    """A log, and all of a simulation that is equal for all caches."""

    requests: Sequence[TracedRequest]
    sizes: StartSizes
    hardware: Hardware
    state_block: int
    """Blocks of the log between two states that are kept at fixed distances."""

    @property
    def footprint_bytes(self) -> int:
        """Bytes of everything: each different block, and one state for each request."""
        num_blocks = len({one for request in self.requests for one in request.ids})
        return num_blocks * self.sizes.block_bytes + len(self.requests) * self.sizes.slot_bytes

    def fixed_placement(self) -> FixedPlacement:
        return FixedPlacement(StateBlocks(1, self.state_block))


def lru(question: Question, num_bytes: int) -> Outcome:
    return _in_two_pools(question, num_bytes, lambda: (LruEviction(), question.fixed_placement()))


def served(question: Question, num_bytes: int) -> Outcome:
    def make() -> tuple[EvictionPolicy, Placement]:
        policy = ValueEviction(question.sizes)
        return policy, _learned(question, policy)

    return _in_two_pools(question, num_bytes, make)


def _in_two_pools(
    question: Question, num_bytes: int, make: Callable[[], tuple[EvictionPolicy, Placement]]
) -> Outcome:
    """Returns the best outcome of all ways to divide the memory."""

    def replay(share: float) -> Outcome:
        pools = Pools.divided(num_bytes, question.sizes, share)
        cache = SimulatedCache(question.sizes, num_bytes, pools, *make())
        return cache.replay(question.requests, question.hardware)

    return max((replay(share) for share in STATE_SHARES), key=lambda outcome: outcome.saved_flops)


def _learned(question: Question, policy: ValueEviction) -> StatePlacement:
    return StatePlacement(question.sizes, lambda: policy.price, spacing=question.state_block)


def value(question: Question, num_bytes: int) -> Outcome:
    policy = ValueEviction(question.sizes, shares_memory=True)
    pools = Pools.shared(num_bytes, question.sizes)
    cache = SimulatedCache(question.sizes, num_bytes, pools, policy, question.fixed_placement())
    return cache.replay(question.requests, question.hardware)


def value_and_placement(question: Question, num_bytes: int) -> Outcome:
    policy = ValueEviction(question.sizes, shares_memory=True)
    pools = Pools.shared(num_bytes, question.sizes)
    cache = SimulatedCache(question.sizes, num_bytes, pools, policy, _learned(question, policy))
    return cache.replay(question.requests, question.hardware)


def marconi(question: Question, num_bytes: int) -> Outcome:
    def replay(alpha: float, requests: Sequence[TracedRequest]) -> tuple[Outcome, MarconiEviction]:
        policy = MarconiEviction(question.sizes, alpha)
        pools = Pools.shared(num_bytes, question.sizes)
        cache = SimulatedCache(question.sizes, num_bytes, pools, policy, JudiciousPlacement())
        return cache.replay(requests, question.hardware), policy

    _, policy = replay(0.0, question.requests[:MAX_BOOTSTRAP])
    first = question.requests[: min(MAX_BOOTSTRAP, BOOTSTRAP_FACTOR * policy.first_eviction)]
    alpha = max(ALPHAS, key=lambda one: replay(one, first)[0].num_hit) if first else 0.0
    return replay(alpha, question.requests)[0]


def clairvoyant(question: Question, num_bytes: int) -> Outcome:
    future = Future(question.requests, question.sizes.block_tokens)
    policy = ClairvoyantEviction(question.sizes, future)
    pools = Pools.shared(num_bytes, question.sizes)
    cache = SimulatedCache(question.sizes, num_bytes, pools, policy, ClairvoyantPlacement(future))
    return cache.replay(question.requests, question.hardware)


CONTENDERS: dict[str, Callable[[Question, int], Outcome]] = {
    "lru": lru,
    "value": value,
    "value+placement": value_and_placement,
    "served": served,
    "marconi": marconi,
    "clairvoyant": clairvoyant,
}
