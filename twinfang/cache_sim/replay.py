"""Replays a log against one cache: each request is looked up, computed and entered before the next comes.

So no request misses what another one is computing just then. Times to the first token are those of prompts
that are computed alone, in chunks, by the cost model: no request waits for another. A prompt for which the
budget is too small is computed without the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from engine.cost.step_cost import PrefillCost, pairs_of
from engine.memory.eviction import EvictionPolicy
from engine.memory.prefix_cache import PrefixCache
from engine.memory.start_sizes import StartSizes
from twinfang.cache_sim.budget import Pools
from twinfang.cache_sim.placements import Placement
from twinfang.cache_sim.trace import TracedRequest
from wire.messages.prefixes import block_keys


@dataclass(frozen=True)
class Hardware:
    """What decides times: the model's costs on a device, and the tokens of a step."""

    cost: PrefillCost
    chunk_tokens: int

    def ttft_s(self, num_cached: int, num_prompt: int) -> float:
        """Returns the time to compute a prompt behind its cached tokens."""
        seconds = 0.0
        for start in range(num_cached, num_prompt, self.chunk_tokens):
            size = min(self.chunk_tokens, num_prompt - start)
            seconds += self.cost.seconds(size, pairs_of(start, size))
        return seconds


@dataclass
class Outcome:
    """What a cache did for the requests of a log."""

    num_tokens: int = 0
    """Tokens of all prompts."""
    num_hit: int = 0
    """Tokens that were not computed."""
    flops: float = 0.0
    saved_flops: float = 0.0
    num_states: int = 0
    """Number of states that were kept."""
    num_uncached: int = 0
    """Number of prompts that are larger than the budget."""
    ttfts_s: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.num_hit / max(1, self.num_tokens)

    @property
    def saved_share(self) -> float:
        """Share of all prompts' FLOP that was not computed."""
        return self.saved_flops / self.flops if self.flops else 0.0

    @property
    def mean_ttft_s(self) -> float:
        return sum(self.ttfts_s) / max(1, len(self.ttfts_s))

    @property
    def p95_ttft_s(self) -> float:
        return sorted(self.ttfts_s)[int(0.95 * (len(self.ttfts_s) - 1))] if self.ttfts_s else 0.0


class SimulatedCache:
    """The engine's prefix cache and policies over memory that holds nothing.

    Lengths are in blocks of the log. To the prefix cache each of them is a block of one token: its id.
    """

    def __init__(
        self, sizes: StartSizes, num_bytes: int, pools: Pools, policy: EvictionPolicy, placement: Placement
    ) -> None:
        self._sizes = sizes
        self._num_bytes = num_bytes
        self._pools = pools
        self._placement = placement
        self.cache = PrefixCache(pools.blocks, pools.slots, block_size=1, fingerprint="", policy=policy)

    def replay(self, requests: Iterable[TracedRequest], hardware: Hardware) -> Outcome:
        outcome = Outcome()
        for request in requests:
            num_cached = self._serve(request, outcome)
            tokens = num_cached * self._sizes.block_tokens
            outcome.num_tokens += request.num_prompt
            outcome.num_hit += tokens
            prompt_blocks = request.num_prompt // self._sizes.block_tokens
            outcome.flops += self._sizes.flops(0, prompt_blocks)
            outcome.saved_flops += self._sizes.flops(0, num_cached)
            outcome.ttfts_s.append(hardware.ttft_s(tokens, request.num_prompt))
        return outcome

    def _serve(self, request: TracedRequest, outcome: Outcome) -> int:
        """Serves one request and returns the number of blocks that it found in the cache."""
        cache, ids, sizes = self.cache, request.ids, self._sizes
        keys = block_keys(ids, block_size=1, fingerprint="", salt="")
        match = cache.match(keys[: request.num_usable(sizes.block_tokens)], needs_state=True)
        marks = self._placement.mark(replace(match, keys=keys))
        cache.used(match)
        # A prompt that was cached whole: its last block is known too, though no request may start behind it.
        nodes, num_cached = cache.match(keys, needs_state=False).nodes, len(match.nodes)
        num_new = len(ids) - len(nodes)
        cache.hold(nodes)
        if match.state is not None:
            cache.hold_state(match.state)
        if self._has_room(len(ids), num_new, int(match.state is not None)):
            block_ids = cache.blocks_of(nodes) + cache.allocate_blocks(num_new)
            cache.extend(nodes, keys, len(keys), block_ids)
            for mark in marks:
                node = nodes[mark.num_blocks - 1]
                if node.state is None and self._has_slot(len(ids), int(match.state is not None)):
                    state = cache.put_state(node, cache.allocate_slot(), mark.place)
                    assert state is not None
                    outcome.num_states += 1
                    cache.release_state(state)
        else:
            outcome.num_uncached += 1
        if match.state is not None:
            cache.release_state(match.state)
        cache.release(reversed(nodes))
        return num_cached

    def _has_room(self, num_held: int, num_new: int, num_states: int) -> bool:
        """Whether a prompt of ``num_held`` blocks fits, if all that no request holds is given up."""
        if not self._pools.are_shared:
            return self.cache.num_available_blocks >= num_new
        held = num_held * self._sizes.block_bytes + num_states * self._sizes.slot_bytes
        return held <= self._num_bytes

    def _has_slot(self, num_held: int, num_states: int) -> bool:
        if not self._pools.are_shared:
            return self.cache.num_available_slots >= 1
        held = num_held * self._sizes.block_bytes + (num_states + 1) * self._sizes.slot_bytes
        return held <= self._num_bytes
