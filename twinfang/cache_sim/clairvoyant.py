"""A cache that knows the log's future, for comparison: it keeps states only where a later request starts, and
gives up the start that saves least per byte and per request until its next use.

The best order of evictions with entries of different sizes and values is not computable in reasonable time.
So this is no strict bound, but no policy that does not know the future is expected to reach it. A strict
bound is the same cache with endless memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from engine.memory.cached_start import CachedState, Match, Place
from engine.memory.start_sizes import StartSizes
from engine.memory.state_placement import Mark
from engine.memory.value_eviction import start_neighbours
from twinfang.cache_sim.scanned_eviction import ScannedEviction
from twinfang.cache_sim.trace import TracedRequest

NEVER = 1 << 60


class Future:
    """When each block of a log is asked for, and which request is served now."""

    def __init__(self, requests: Sequence[TracedRequest], block_tokens: int) -> None:
        self._requests = requests
        self.now = -1
        self._uses: dict[int, list[int]] = {}
        for number, request in enumerate(requests):
            for one in request.ids[: request.num_usable(block_tokens)]:
                self._uses.setdefault(one, []).append(number)

    def next_use(self, block: int) -> int:
        """Returns the number of the next request after this one whose prompt has the block."""
        uses = self._uses.get(block, ())
        index = bisect_right(uses, self.now)
        return uses[index] if index < len(uses) else NEVER

    def num_uses(self, block: int) -> int:
        """Returns the number of later requests whose prompt has the block."""
        uses = self._uses.get(block, ())
        return len(uses) - bisect_right(uses, self.now)

    @property
    def ids(self) -> Sequence[int]:
        return self._requests[self.now].ids


class ClairvoyantPlacement:
    def __init__(self, future: Future) -> None:
        self._future = future

    def mark(self, match: Match) -> list[Mark]:
        """Marks the places at which later requests leave this one."""
        self._future.now += 1
        ids, marks, behind = self._future.ids, [], 0
        for length in range(len(match.keys), len(match.nodes), -1):
            num_uses = self._future.num_uses(ids[length - 1])
            if num_uses != behind:
                marks.append(Mark(length, Place.INNER))
            behind = num_uses
        return marks[::-1]


class ClairvoyantEviction(ScannedEviction[tuple[int, float]]):
    """Notes the last block's id of an idle start, and the FLOP that a byte of it saves.

    It knows the blocks' ids by the place of a start in the log: the cache's keys are hashes of them."""

    def __init__(self, sizes: StartSizes, future: Future) -> None:
        super().__init__()
        self._sizes = sizes
        self._future = future

    def used(self, match: Match) -> None:
        pass

    def kept(self, state: CachedState) -> None:
        state.last_request = self._future.ids[state.node.num_blocks - 1]
        shorter, _ = start_neighbours(state)
        if shorter is not None and shorter in self._idle:
            self.offer_state(shorter)

    def offer_state(self, state: CachedState) -> None:
        shorter, num_alone = start_neighbours(state)
        start = 0 if shorter is None else shorter.node.num_blocks
        num_bytes = self._sizes.slot_bytes + num_alone * self._sizes.block_bytes
        saved = self._sizes.flops(start, state.node.num_blocks)
        self._idle[state] = (state.last_request, saved / num_bytes)

    def _least(self) -> CachedState:
        future = self._future

        def value(state: CachedState) -> float:
            block, worth = self._idle[state]
            following = future.next_use(block)
            return -1.0 if following == NEVER else worth / (following - future.now)

        return min((state for state in self._idle if state.num_users == 0), key=value)
