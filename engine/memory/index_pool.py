"""Hands out the indices of a pool: KV blocks or state slots. It uses no tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable

NULL_INDEX = 0
"""The reserved entry of every pool. Padding points at it, and no request owns it."""


class IndexPool:
    """Knows which of the indices ``1 … size - 1`` of a pool are free. Entry 0 is the null entry.

    The index that was freed last is handed out first, so that a small working set stays in the processor's
    caches. A new pool hands out consecutive indices, so that transfers can merge them into one region.
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
        """Number of indices that can be owned: all except the null entry."""
        return self.size - 1

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` indices. The caller has checked :attr:`num_free`.

        Raises :class:`RuntimeError` if too few are free, which is a bug in our code.
        """
        if count > len(self._free):
            raise RuntimeError(f"asked for {count} {self._unit}s; only {len(self._free)} are free")
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        taken.reverse()
        for index in taken:
            self._is_free[index] = 0
        return taken

    def free(self, indices: Iterable[int]) -> None:
        """Give indices back.

        Raises :class:`RuntimeError` if an index is free already or is the null entry: a bug in our code.
        """
        for index in reversed(list(indices)):
            if index == NULL_INDEX or self._is_free[index]:
                raise RuntimeError(f"{self._unit} {index} is freed, but nobody owns it")
            self._is_free[index] = 1
            self._free.append(index)
            for listener in self._listeners:
                listener(index)

    @property
    def free_map(self) -> memoryview:
        """A read-only view of ``size`` bytes that shows later changes too: 1 if the index is free."""
        return memoryview(self._is_free).toreadonly()

    def on_free(self, listener: Callable[[int], None]) -> None:
        """Call ``listener`` with every index that is freed from now on."""
        self._listeners.append(listener)
