"""Which blocks and states a full prefix cache gives up: the protocol of the policies, and the simplest one.

| policy | gives up first |
|---|---|
| :class:`LruEviction` | what was used least recently; leaves without a state before leaves with one |
| :class:`engine.memory.value_eviction.ValueEviction` | the start that saves least per byte that it holds |

A policy uses no clock: its time is the number of requests or of uses. So ranks that get the same requests
in the same order give up the same blocks and states.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import Literal, Protocol

from engine.memory.cached_start import CachedBlock, CachedState, Match

CachePolicyName = Literal["lru", "value"]

STALE_FACTOR = 4
"""A heap of candidates is cleaned when it is this many times longer than after the last cleaning."""
SHORTEST_CLEANED = 64


class EvictionPolicy(Protocol):
    """Orders what no request holds. The prefix cache tells it what happens, and asks it what to give up.

    Candidates may become stale after they were offered; a policy checks them when it is asked.
    """

    def used(self, match: Match) -> None:
        """Notes that a request was admitted with this cached prefix, which may be empty."""

    def kept(self, state: CachedState) -> None:
        """Notes that a state was added to its block. A request holds it."""

    def offer_block(self, node: CachedBlock) -> None:
        """Notes that a block may have become an idle leaf, or a leaf without a state."""

    def offer_state(self, state: CachedState) -> None:
        """Notes that no request uses a state any longer."""

    def next_block(self) -> CachedBlock | CachedState:
        """Returns what is to be given up for a block: an idle leaf, or a state, if states and blocks share
        their memory. The cache has at least one idle leaf."""

    def next_state(self) -> CachedBlock | CachedState:
        """Returns what is to be given up for a slot: an idle state, or an idle leaf, if states and blocks
        share their memory. The cache has at least one idle state."""

    def dropped(self, state: CachedState) -> None:
        """Notes that a state was given up, alone or with its block."""

    def value(self, state: CachedState) -> float:
        """Returns a number by which starts are compared: higher for one that is worth more."""


class Unlearned:
    """The events that a policy that learns nothing leaves aside. It values what was used last."""

    def used(self, match: Match) -> None:
        pass

    def kept(self, state: CachedState) -> None:
        pass

    def dropped(self, state: CachedState) -> None:
        pass

    def value(self, state: CachedState) -> float:
        return float(state.last_used)


class LeafHeap:
    """Idle leaves: those without a state first, then by last use."""

    def __init__(self) -> None:
        self._heap: list[tuple[bool, int, int, CachedBlock]] = []
        self._order = count()
        self._limit = SHORTEST_CLEANED

    def offer(self, node: CachedBlock) -> None:
        if node.num_users == 0 and node.num_children == 0:
            entry = (node.state is not None, node.last_used, next(self._order), node)
            heapq.heappush(self._heap, entry)
            if len(self._heap) > self._limit:
                self._heap = [one for one in self._heap if _is_fresh(one)]
                heapq.heapify(self._heap)
                self._limit = max(SHORTEST_CLEANED, STALE_FACTOR * len(self._heap))

    def pop(self) -> CachedBlock | None:
        """Takes the first leaf that is still one; None if there is none."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if _is_fresh(entry):
                return entry[3]
        return None


def _is_fresh(entry: tuple[bool, int, int, CachedBlock]) -> bool:
    has_state, last_used, _, node = entry
    return node.is_idle_leaf and last_used == node.last_used and has_state == (node.state is not None)


class LruEviction(Unlearned):
    """Gives up what was used least recently. Blocks and states have memory of their own."""

    def __init__(self) -> None:
        self._leaves = LeafHeap()
        self._states: list[tuple[int, int, CachedState]] = []
        self._order = count()
        self._limit = SHORTEST_CLEANED

    def offer_block(self, node: CachedBlock) -> None:
        self._leaves.offer(node)

    def offer_state(self, state: CachedState) -> None:
        heapq.heappush(self._states, (state.last_used, next(self._order), state))
        if len(self._states) > self._limit:
            self._states = [one for one in self._states if _is_fresh_state(one)]
            heapq.heapify(self._states)
            self._limit = max(SHORTEST_CLEANED, STALE_FACTOR * len(self._states))

    def next_block(self) -> CachedBlock:
        node = self._leaves.pop()
        assert node is not None, "the cache counts an idle leaf that was not offered"
        return node

    def next_state(self) -> CachedState:
        while True:
            entry = heapq.heappop(self._states)
            if _is_fresh_state(entry):
                return entry[2]


def _is_fresh_state(entry: tuple[int, int, CachedState]) -> bool:
    last_used, _, state = entry
    return state.num_users == 0 and state.last_used == last_used and state.node.state is state
