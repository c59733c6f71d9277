"""How often, where and how soon requests leave earlier prompts: what :mod:`engine.memory.state_placement` has
learned.

Counted are prompts, and those that were left, by bin of the distance from their end, and by age: the number of
requests in between.
"""

from __future__ import annotations

from engine.memory.reuse_rates import (
    FIRST_REFRESH,
    MEMORY,
    NUM_AGES,
    PRIOR_BINS,
    REFRESH,
    age_bin,
    best_stay,
)

PRIOR_PROMPTS = 4.0
PRIOR_LEFT_AT_END = 2.0
"""Before anything is learned, every second prompt is expected to be continued at its end."""

Stay = tuple[float, float]
"""The chance that a state is used, and the mean number of requests for which it is kept until it is used or has
waited too long."""


class LeavingRates:
    """Counts by bin and age, and the stays that follow from them."""

    def __init__(self, num_bins: int) -> None:
        self._num_prompts = PRIOR_PROMPTS
        self._left = [[0.0] * NUM_AGES for _ in range(num_bins)]
        self._left[0][:PRIOR_BINS] = [PRIOR_LEFT_AT_END / PRIOR_BINS] * PRIOR_BINS
        self._next_refresh = 0
        self.stays: list[list[Stay]] = []
        """``stays[last][first]`` is the stay of a state that serves those who leave in the bins from ``first``
        to ``last``. There are bins up to the last one in which a request has left."""
        self.refresh(0)

    def add_prompt(self) -> None:
        self._num_prompts += 1.0

    def add_left(self, bin_: int, age: int) -> None:
        """Counts a request that is the first to leave a prompt of this age."""
        self._left[bin_][age_bin(age)] += 1.0

    def refresh(self, request_number: int) -> None:
        """Computes the stays anew if it is time."""
        if request_number < self._next_refresh:
            return
        self._next_refresh = request_number + max(FIRST_REFRESH, min(request_number, REFRESH))
        num_bins = max(bin_ for bin_, ages in enumerate(self._left) if any(ages)) + 1
        self.stays = [self._stays(last) for last in range(num_bins)]
        self._num_prompts *= MEMORY
        for ages in self._left:
            ages[:] = [MEMORY * number for number in ages]

    def _stays(self, last: int) -> list[Stay]:
        left, stays = [0.0] * NUM_AGES, []
        for first in range(last, -1, -1):
            left = [one + more for one, more in zip(left, self._left[first], strict=True)]
            stays.append(best_stay(left, max(0.0, self._num_prompts - sum(left))))
        return stays[::-1]
