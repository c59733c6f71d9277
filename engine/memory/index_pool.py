"""Hands out the indices of a pool: KV blocks or state slots. It uses no tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from engine.memory.free_runs import FreeRuns

NULL_INDEX = 0
"""The reserved entry of every pool. Padding points at it, and no request owns it."""


class Indices(Protocol):
    """A pool as the prefix cache sees it."""

    @property
    def num_free(self) -> int: ...

    def allocate(self, count: int, behind: int = NULL_INDEX) -> list[int]: ...

    def free(self, indices: Iterable[int]) -> None: ...


class IndexPool:
    """Knows which of the indices ``1 … size - 1`` of a pool are free. Entry 0 is the null entry.

    It hands out adjacent indices if it can, because a transfer reads adjacent blocks as one range
    (:class:`FreeRuns`).
    """

    def __init__(self, size: int, unit: str) -> None:
        self.size = size
        self._unit = unit
        self._free = FreeRuns(NULL_INDEX + 1, size)
        self._is_free = bytearray([0]) + bytearray([1]) * (size - 1)
        self._listeners: list[Callable[[int], None]] = []

    @property
    def num_free(self) -> int:
        return self._free.num_free

    @property
    def capacity(self) -> int:
        """Number of indices that can be owned: all except the null entry."""
        return self.size - 1

    def allocate(self, count: int, behind: int = NULL_INDEX) -> list[int]:
        """Take ``count`` indices, those directly behind index ``behind`` first. The caller has checked
        :attr:`num_free`.

        Raises :class:`RuntimeError` if too few are free, which is a bug in our code.
        """
        if count > self.num_free:
            raise RuntimeError(f"asked for {count} {self._unit}s; only {self.num_free} are free")
        taken = self._free.take_behind(behind, count) if behind != NULL_INDEX else []
        taken += self._free.take(count - len(taken))
        for index in taken:
            self._is_free[index] = 0
        return taken

    def free(self, indices: Iterable[int]) -> None:
        """Give indices back.

        Raises :class:`RuntimeError` if an index is free already or is the null entry: a bug in our code.
        """
        start = end = NULL_INDEX
        for index in indices:
            if index == NULL_INDEX or self._is_free[index]:
                raise RuntimeError(f"{self._unit} {index} is freed, but nobody owns it")
            self._is_free[index] = 1
            if index != end:
                if end > start:
                    self._free.add(start, end)
                start = index
            end = index + 1
            for listener in self._listeners:
                listener(index)
        if end > start:
            self._free.add(start, end)

    @property
    def free_map(self) -> memoryview:
        """A read-only view of ``size`` bytes that shows later changes too: 1 if the index is free."""
        return memoryview(self._is_free).toreadonly()

    def on_free(self, listener: Callable[[int], None]) -> None:
        """Call ``listener`` with every index that is freed from now on."""
        self._listeners.append(listener)
