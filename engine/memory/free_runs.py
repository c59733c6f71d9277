"""The free indices of a pool as runs of adjacent ones. Pure bookkeeping."""

from __future__ import annotations

LOOKS = 8
"""Number of runs of about the right length that are looked at for the best fit."""


class FreeRuns:
    """Free indices, kept so that a request can get adjacent ones.

    Indices come from the shortest run that is long enough, as far as a look at a few runs shows. So single
    indices fill the gaps between owners, and long runs stay whole. Among runs of about a length, the one that
    was freed last comes first, because its memory is still in the processor's caches.
    """

    def __init__(self, first: int, end: int) -> None:
        self.num_free = 0
        self._end_of: dict[int, int] = {}
        """The end of each run, by its first index."""
        self._start_of: dict[int, int] = {}
        self._by_size: list[dict[int, None]] = [{} for _ in range((end - first).bit_length() + 1)]
        """The first indices of the runs with lengths of ``i`` binary digits, the oldest run first."""
        if end > first:
            self._enter(first, end)

    def take(self, count: int) -> list[int]:
        """Take ``count`` indices, which must be free: of one run if there is such a run, else of few."""
        if count == self.num_free:
            return self._take_all()
        taken: list[int] = []
        missing = count
        while missing > 0:
            start = self._fitting(missing)
            if start is None:
                start = self._longest()
            end = self._remove(start)
            used = end
            if end > start + missing:
                used = start + missing
                self._enter(used, end)
            taken += range(start, used)
            missing -= used - start
        return taken

    def _take_all(self) -> list[int]:
        """Take all indices. A full cache gives up just as many as are missing, mostly in many short runs."""
        taken: list[int] = []
        for start, end in sorted(self._end_of.items()):
            taken += range(start, end)
        self._end_of.clear()
        self._start_of.clear()
        for runs in self._by_size:
            runs.clear()
        self.num_free = 0
        return taken

    def take_behind(self, index: int, count: int) -> list[int]:
        """Take up to ``count`` indices that follow ``index`` without a gap. May be none."""
        start = index + 1
        if start not in self._end_of:
            return []
        end = self._remove(start)
        used = min(end, start + count)
        if used < end:
            self._enter(used, end)
        return list(range(start, used))

    def add(self, start: int, end: int) -> None:
        """Add the indices from ``start`` up to ``end``, and join them with their neighbours."""
        before = self._start_of.get(start)
        if before is not None:
            self._remove(before)
            start = before
        if end in self._end_of:
            end = self._remove(end)
        self._enter(start, end)

    def _fitting(self, count: int) -> int | None:
        """Return the first index of a run of at least ``count``; None if there is none, as far as a look at
        :data:`LOOKS` runs of each length shows. Lengths with one digit more always fit."""
        digits = count.bit_length()
        best: tuple[int, int] | None = None
        for start, _ in zip(reversed(self._by_size[digits]), range(LOOKS), strict=False):
            length = self._end_of[start] - start
            if length == count:
                return start
            if length > count and (best is None or length < best[0]):
                best = (length, start)
        if best is not None:
            return best[1]
        for longer in range(digits + 1, len(self._by_size)):
            if self._by_size[longer]:
                return next(reversed(self._by_size[longer]))
        return None

    def _longest(self) -> int:
        """Return the first index of a run among the longest. There must be one."""
        for runs in reversed(self._by_size):
            if runs:
                return next(reversed(runs))
        raise AssertionError("more indices are taken than are free")

    def _enter(self, start: int, end: int) -> None:
        self._end_of[start], self._start_of[end] = end, start
        self._by_size[(end - start).bit_length()][start] = None
        self.num_free += end - start

    def _remove(self, start: int) -> int:
        """Remove a run and return its end."""
        end = self._end_of.pop(start)
        del self._start_of[end]
        del self._by_size[(end - start).bit_length()][start]
        self.num_free -= end - start
        return end
