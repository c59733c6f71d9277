"""The observations of a Prometheus histogram in a period. Does no I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Histogram:
    """Counts of observations between bounds, and their sum."""

    bounds: tuple[float, ...] = ()
    """The buckets' upper bounds, rising; the last is infinite."""
    counts: tuple[float, ...] = ()
    """Observations in each bucket, not cumulative."""
    total: float = 0.0
    """Sum of all observations."""

    @classmethod
    def of(cls, cumulative: Mapping[float, float], total: float) -> Histogram:
        """Makes a histogram from a page's cumulative counts. ``cumulative`` gives for each bound the number
        of observations that were not above it, and ``total`` is the sum of all observations."""
        bounds = tuple(sorted(cumulative))
        below = (0.0, *(cumulative[bound] for bound in bounds))
        counts = tuple(max(0.0, high - low) for low, high in pairwise(below))
        return cls(bounds, counts, max(0.0, total))

    @property
    def count(self) -> float:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """0 where nothing was observed."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Returns the value that ``share`` of all observations did not exceed, interpolated within a bucket;
        0 if nothing was observed."""
        wanted, seen = share * self.count, 0.0
        for low, high, count in self._buckets():
            if count and seen + count >= wanted:
                return low + (high - low) * (wanted - seen) / count
            seen += count
        return 0.0

    def share_above(self, limit: float) -> float:
        """Returns the share of observations above ``limit``, interpolated within a bucket; 0 if nothing was
        observed."""
        above = 0.0
        for low, high, count in self._buckets():
            if low >= limit:
                above += count
            elif high > limit:
                above += count * (high - limit) / (high - low)
        return above / self.count if self.count else 0.0

    def weighted(self) -> list[tuple[float, float]]:
        """Returns a value for each bucket, and the bucket's share of all observations. The value is the
        bucket's middle, scaled so that the mean of all values is the true mean."""
        if not self.count:
            return []
        middles = [((low + high) / 2, count / self.count) for low, high, count in self._buckets() if count]
        mean = sum(value * share for value, share in middles)
        stretch = self.mean / mean if mean and self.total else 1.0
        return [(value * stretch, share) for value, share in middles]

    def _buckets(self) -> list[tuple[float, float, float]]:
        """Returns bounds and counts. Values above the last finite bound are assumed to be at most twice that
        bound."""
        lows = (0.0, *self.bounds)
        return [
            (low, high if math.isfinite(high) else 2 * low, count)
            for low, high, count in zip(lows, self.bounds, self.counts, strict=False)
        ]


def added(histograms: list[Histogram]) -> Histogram:
    """Adds histograms of several processes. Histograms without observations may have no bounds."""
    filled = [one for one in histograms if one.count]
    if not filled:
        return Histogram()
    bounds = filled[0].bounds
    # Servers of another version may have other bounds; their histograms are left out.
    alike = [one for one in filled if one.bounds == bounds]
    counts = tuple(sum(parts) for parts in zip(*(one.counts for one in alike), strict=True))
    return Histogram(bounds, counts, sum(one.total for one in alike))
