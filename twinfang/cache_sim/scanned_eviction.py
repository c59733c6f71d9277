"""What the policies share that look at every idle start to find the next one to give up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from engine.memory.cached_start import CachedBlock, CachedState
from engine.memory.eviction import LeafHeap

Note = TypeVar("Note")


class ScannedEviction(ABC, Generic[Note]):
    """Gives up blocks that lead to no start first, then the start that :meth:`_least` finds."""

    def __init__(self) -> None:
        self._tails = LeafHeap()
        self._idle: dict[CachedState, Note] = {}
        """Idle starts, each with what the policy notes of it."""

    def offer_block(self, node: CachedBlock) -> None:
        if node.state is None:
            self._tails.offer(node)

    def dropped(self, state: CachedState) -> None:
        self._idle.pop(state, None)

    def value(self, state: CachedState) -> float:
        return float(state.last_used)

    def next_block(self) -> CachedBlock | CachedState:
        return self._tails.pop() or self._least()

    def next_state(self) -> CachedBlock | CachedState:
        return self._tails.pop() or self._least()

    @abstractmethod
    def _least(self) -> CachedState:
        """Returns the start to give up next; no request uses it."""
