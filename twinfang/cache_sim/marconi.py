"""FLOP-aware eviction, written from its paper: Pan and others, "Marconi: Prefix Caching for the Era of Hybrid
LLMs", arXiv 2411.19379, sections 4.2 and 4.3.

A start with at most one start or branch behind it can be given up. The one with the least score goes:

    score = recency + alpha * FLOP efficiency

Both are scaled to 0 … 1 over all candidates. FLOP efficiency is the FLOP that the start saves beyond its
parent, divided by the bytes of its state and of its KV. ``alpha`` is the one of :data:`ALPHAS` with which the
first requests of the log would have hit most; these are BOOTSTRAP_FACTOR times those before the first
eviction. The paper says 5 to 15 times, and leaves the grid open.
"""

from __future__ import annotations

from engine.memory.cached_start import CachedState, Match
from engine.memory.start_sizes import StartSizes
from engine.memory.value_eviction import start_neighbours
from twinfang.cache_sim.scanned_eviction import ScannedEviction

ALPHAS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
BOOTSTRAP_FACTOR = 5
MAX_BOOTSTRAP = 1000


class MarconiEviction(ScannedEviction[float]):
    """Blocks and states share one budget, as in the paper. Of an idle start the FLOP efficiency is noted that
    it had when it was last used."""

    def __init__(self, sizes: StartSizes, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha
        self._sizes = sizes
        self._num_requests = 0
        self.first_eviction = 0
        """Number of requests before the first eviction; 0: there was none."""

    def used(self, match: Match) -> None:
        self._num_requests += 1
        if match.state is not None:
            match.state.last_request = self._num_requests

    def kept(self, state: CachedState) -> None:
        state.last_request = self._num_requests
        shorter, _ = start_neighbours(state)
        if shorter is not None and shorter in self._idle:
            self._idle[shorter] = self._efficiency(shorter)

    def offer_state(self, state: CachedState) -> None:
        self._idle[state] = self._efficiency(state)

    def _least(self) -> CachedState:
        self.first_eviction = self.first_eviction or self._num_requests
        idle = [(state, value) for state, value in self._idle.items() if state.num_users == 0]
        able = [one for one in idle if one[0].node.num_children <= 1] or idle
        oldest = min(state.last_request for state, _ in able)
        newest = max(state.last_request for state, _ in able)
        lowest, highest = min(value for _, value in able), max(value for _, value in able)
        per_request = 1.0 / max(1, newest - oldest)
        per_flop = self.alpha / (highest - lowest or 1.0)
        least = min(
            able,
            key=lambda one: (one[0].last_request - oldest) * per_request + (one[1] - lowest) * per_flop,
        )
        return least[0]

    def _efficiency(self, state: CachedState) -> float:
        shorter, num_alone = start_neighbours(state)
        start = 0 if shorter is None else shorter.node.num_blocks
        num_bytes = self._sizes.slot_bytes + num_alone * self._sizes.block_bytes
        return self._sizes.flops(start, state.node.num_blocks) / num_bytes
