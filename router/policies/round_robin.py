"""Servers in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class RoundRobin:
    """Takes candidates in turn; servers that come and go only shift whose turn it is."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Sequence[T]) -> T:
        """One of ``candidates``, which may not be empty."""
        chosen = candidates[self._turn % len(candidates)]
        self._turn += 1
        return chosen
