"""A histogram that one thread writes, in so little time that it may sit in an engine's step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily


class Tally:
    """Counts of observations by bucket. About a microsecond each: no lock, no search bucket by bucket.

    One thread adds. Others read while it does: what they see may lack the newest observation.
    """

    def __init__(self, upper_bounds: Sequence[float]) -> None:
        self._bounds = tuple(upper_bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """``times`` observations of the same value. One of a bound's own value is within its bucket."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    @property
    def total(self) -> float:
        """Sum of all values."""
        return self._sum

    def put_into(self, family: HistogramMetricFamily, labels: Sequence[str] = ()) -> None:
        """Adds this one's sample to a family, buckets cumulative as Prometheus wants them."""
        total, counts = self._sum, list(self._counts)
        buckets: list[tuple[str, float]] = []
        below = 0
        for bound, count in zip((*self._bounds, math.inf), counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound == math.inf else str(bound), below))
        family.add_metric(list(labels), buckets=buckets, sum_value=total)
