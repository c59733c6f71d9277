"""The memory of a simulated cache: pools of their own for blocks and states, or one budget for both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.memory.index_pool import NULL_INDEX, IndexPool, Indices
from engine.memory.start_sizes import StartSizes


class ByteBudget:
    """Bytes that several kinds of entries share."""

    def __init__(self, num_bytes: int) -> None:
        self.num_free = num_bytes


class SharedIndices:
    """Hands out indices of entries of one size, as long as the budget has bytes."""

    def __init__(self, budget: ByteBudget, entry_bytes: int) -> None:
        self._budget = budget
        self._entry_bytes = entry_bytes
        self._unused: list[int] = []
        self._num_made = 0

    @property
    def num_free(self) -> int:
        return self._budget.num_free // self._entry_bytes

    def allocate(self, count: int, behind: int = NULL_INDEX) -> list[int]:
        if count > self.num_free:
            raise RuntimeError(f"asked for {count} entries; only {self.num_free} are free")
        self._budget.num_free -= count * self._entry_bytes
        taken = [self._unused.pop() for _ in range(min(count, len(self._unused)))]
        while len(taken) < count:
            self._num_made += 1
            taken.append(self._num_made)
        return taken

    def free(self, indices: Iterable[int]) -> None:
        given = list(indices)
        self._budget.num_free += len(given) * self._entry_bytes
        self._unused += given


@dataclass(frozen=True)
class Pools:
    blocks: Indices
    slots: Indices
    are_shared: bool

    @classmethod
    def shared(cls, num_bytes: int, sizes: StartSizes) -> Pools:
        budget = ByteBudget(num_bytes)
        blocks = SharedIndices(budget, sizes.block_bytes)
        return cls(blocks, SharedIndices(budget, sizes.slot_bytes), are_shared=True)

    @classmethod
    def divided(cls, num_bytes: int, sizes: StartSizes, state_share: float) -> Pools:
        """Pools of fixed sizes, as servers divide a device's memory. ``state_share`` of it is for states."""
        num_slots = int(num_bytes * state_share) // sizes.slot_bytes
        num_blocks = (num_bytes - num_slots * sizes.slot_bytes) // sizes.block_bytes
        blocks = IndexPool(num_blocks + 1, "block")
        return cls(blocks, IndexPool(num_slots + 1, "slot"), are_shared=False)
