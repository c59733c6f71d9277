"""Hands out the indices of a pool: KV blocks or state slots. Knows nothing of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable

NULL_INDEX = 0
"""The reserved entry of every pool: padding points at it, nobody owns it."""


class IndexPool:
    """Free indices ``1 … size - 1`` of a pool whose entry 0 is the null entry.

    Freed indices are handed out again last-in first-out, so that a small working set stays in the
    processor's caches; a fresh pool hands out ascending runs, which transfers can coalesce.
    """

    def __init__(self, size: int, unit: str) -> None:
        self.size = size
        self._unit = unit
        self._free = list(range(size - 1, NULL_INDEX, -1))
        self._is_free = bytearray([0]) + bytearray([1]) * (size - 1)
        self._listeners: list[Callable[[int], None]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Indices that can be owned: all but the null entry."""
        return self.size - 1

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` indices. The caller has checked :attr:`num_free`; too few is a fault of ours."""
        if count > len(self._free):
            raise RuntimeError(f"asked for {count} {self._unit}s of {len(self._free)} free ones")
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        taken.reverse()
        for index in taken:
            self._is_free[index] = 0
        return taken

    def free(self, indices: Iterable[int]) -> None:
        """Gives indices back. Freeing twice, or the null entry, is a fault of ours and raises."""
        for index in reversed(list(indices)):
            if index == NULL_INDEX or self._is_free[index]:
                raise RuntimeError(f"{self._unit} {index} is freed, but nobody owns it")
            self._is_free[index] = 1
            self._free.append(index)
            for listener in self._listeners:
                listener(index)

    @property
    def free_map(self) -> memoryview:
        """``[size]`` bytes, live and read-only: 1 where the index is free."""
        return memoryview(self._is_free).toreadonly()

    def on_free(self, listener: Callable[[int], None]) -> None:
        """Calls ``listener`` with every index that is freed from now on."""
        self._listeners.append(listener)
