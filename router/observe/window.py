"""What was measured in the last minute, in constant memory: sums and histograms in slots of one second.

They are arrays, which lie where they were made. If each second brought new objects, these would lie among the
parts of large bodies that are read meanwhile, and keep the memory of these for a minute.

Times are seconds of one monotonic clock. The caller passes them, as it has read the clock already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping

WINDOW_S = 60
BOUNDS_MS = tuple(round(10 ** (tenth / 10), 3) for tenth in range(-10, 61))
"""Upper bounds of the buckets: ten for each decade, from 0.1 ms to 1,000 s."""


class _Slots(ABC):
    """Knows which second each slot belongs to. A slot of an earlier second is emptied before it is used
    again."""

    def __init__(self) -> None:
        self._seconds = array("q", [-WINDOW_S] * WINDOW_S)

    def at(self, now_s: float) -> int:
        """Return the index of this second's slot."""
        second = int(now_s)
        index = second % WINDOW_S
        if self._seconds[index] != second:
            self._seconds[index] = second
            self._empty(index)
        return index

    def recent(self, now_s: float) -> Iterator[int]:
        """Return indices of the slots that are within the window."""
        oldest = int(now_s) - WINDOW_S
        return (index for index, second in enumerate(self._seconds) if second > oldest)

    @abstractmethod
    def _empty(self, index: int) -> None: ...


class WindowSum(_Slots):
    """Adds up numbers.

    Some sums get a number for each token, so an addition must be cheap: only the first one in a second looks
    for its slot.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sums = array("d", [0.0] * WINDOW_S)
        self._until_s = -1.0
        self._index = 0

    def add(self, value: float, now_s: float) -> None:
        if now_s >= self._until_s:
            self._until_s, self._index = int(now_s) + 1.0, self.at(now_s)
        self._sums[self._index] += value

    def total(self, now_s: float) -> float:
        return sum(self._sums[index] for index in self.recent(now_s))

    def _empty(self, index: int) -> None:
        self._sums[index] = 0.0


class WindowHistogram(_Slots):
    """Counts times in buckets of :data:`BOUNDS_MS`. A time above the last bound counts in the last bucket."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = [_no_counts() for _ in range(WINDOW_S)]

    def observe(self, seconds: float, now_s: float) -> None:
        bucket = min(bisect_left(BOUNDS_MS, 1000 * seconds), len(BOUNDS_MS) - 1)
        self._counts[self.at(now_s)][bucket] += 1

    def snapshot(self, now_s: float) -> Distribution:
        recent = (self._counts[index] for index in self.recent(now_s))
        return Distribution([sum(of) for of in zip(*recent, strict=True)])

    def _empty(self, index: int) -> None:
        self._counts[index][:] = _no_counts()


def _no_counts() -> array[int]:
    return array("L", [0] * len(BOUNDS_MS))


class Distribution:
    """The times of one window, as counts by bucket."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts
        self.count = sum(counts)

    @classmethod
    def sum(cls, parts: Iterable[Mapping[int, int]]) -> Distribution:
        """Add up counts by bucket of several processes."""
        counts = [0] * len(BOUNDS_MS)
        for part in parts:
            for bucket, count in part.items():
                counts[bucket] += count
        return cls(counts)

    @property
    def counts(self) -> dict[int, int]:
        """Return the counts of the buckets that are not empty."""
        return {bucket: count for bucket, count in enumerate(self._counts) if count}

    def percentile_ms(self, share: float) -> float | None:
        """Return a percentile, interpolated within its bucket; None if there are no times. Between 0.1 ms and
        1,000 s its error is at most about a quarter of the right value."""
        wanted, seen = share * self.count, 0
        for bucket, count in enumerate(self._counts):
            if count and seen + count >= wanted:
                lower = BOUNDS_MS[bucket - 1] if bucket else 0.0
                return round(lower + (BOUNDS_MS[bucket] - lower) * (wanted - seen) / count, 3)
            seen += count
        return None

    @property
    def histogram(self) -> list[tuple[float, int]]:
        """``(upper bound in ms, count)`` from the first bucket that is not empty to the last one."""
        filled = [bucket for bucket, count in enumerate(self._counts) if count]
        if not filled:
            return []
        return [(BOUNDS_MS[i], self._counts[i]) for i in range(filled[0], filled[-1] + 1)]
