"""How often starts are used again, and where prompts are left, learned from a server's own requests.

Starts are divided into classes, such as "end of a prompt, used once". For each class the ages at which starts
were used again are counted, and how many were not. Age is the number of requests since a start was last used.
A start that was given up and missed later counts as used, at its true age. So the counts say what clients do,
not what the cache had room for.

The rate of a class at an age is the most uses per request that keeping such a start can bring, if it is
kept up to the best age (the index of Gittins, "Bandit Processes and Dynamic Allocation Indices", 1979):

    rate(age) = max over end of  P(used by end) / mean requests until used or end

A start that is used soon or never has a high rate at first, which falls once it has waited too long. Classes
with few counts are drawn towards all classes together.
"""

from __future__ import annotations

from collections.abc import Sequence

NUM_AGES = 22
"""Age bin ``b`` holds the ages of ``b`` binary digits, so 0, 1, 2 to 3, 4 to 7 and so on."""
MEMORY = 0.9
"""Share of the counts that is kept when rates are computed anew. Older requests so count less and less."""
FIRST_REFRESH, REFRESH = 16, 256
"""Rates are computed after so many requests at first, and later."""
PRIOR_STARTS = 4.0
"""Number of starts that all classes together count for, in the rates of one class."""
UNUSED_WEIGHT = 0.3
"""What a start that was given up counts for, compared with one that was used: many of them would have been
used later, after they are forgotten."""
PRIOR_BINS = 11
"""Before anything is learned, half of all starts are expected to be used, equally likely in each of the first
bins."""

PRIOR_PROMPTS = 4.0
PRIOR_LEFT_AT_END = 2.0
"""Before anything is learned, every second prompt is expected to be continued at its end."""

_LOWEST = [0.0, *(float(1 << bin_ >> 1) for bin_ in range(1, NUM_AGES))]
_HIGHEST = [0.0, *(float((1 << bin_) - 1) for bin_ in range(1, NUM_AGES))]
_MEAN = [(low + high) / 2 for low, high in zip(_LOWEST, _HIGHEST, strict=True)]


Stay = tuple[float, float]
"""The chance that a state is used, and the mean number of requests for which it is kept: until it is used, or
has waited too long."""


def age_bin(age: int) -> int:
    return min(age.bit_length(), NUM_AGES - 1)


class ReuseRates:
    """Counts of uses by class and age, of starts that were not used, and the rates that follow from them."""

    def __init__(self, num_classes: int) -> None:
        self._used = [[0.0] * NUM_AGES for _ in range(num_classes)]
        self._unused = [0.0] * num_classes
        self._next_refresh = FIRST_REFRESH
        self._prior_used = [0.5 / PRIOR_BINS] * PRIOR_BINS + [0.0] * (NUM_AGES - PRIOR_BINS)
        prior = _rates(self._prior_used, 0.5)
        self.rates = [prior] * num_classes
        """Uses per request to be expected, by class and age bin."""

    def used(self, start_class: int, age: int) -> None:
        """Counts a start that was used at this age."""
        self._used[start_class][age_bin(age)] += 1.0

    def ended(self, start_class: int) -> None:
        """Counts a start that was given up."""
        self._unused[start_class] += UNUSED_WEIGHT

    def used_after_end(self, start_class: int, age: int) -> None:
        """Counts a start as used that was given up and was missed at ``age``."""
        self._unused[start_class] = max(0.0, self._unused[start_class] - UNUSED_WEIGHT)
        self.used(start_class, age)

    def refresh(self, request_number: int) -> None:
        """Computes the rates anew if it is time."""
        if request_number < self._next_refresh:
            return
        self._next_refresh = request_number + min(request_number, REFRESH)
        used = [sum(counts) for counts in zip(*self._used, strict=True)]
        unused = sum(self._unused)
        used, unused = _mixed(used, unused, self._prior_used, 0.5)
        total = sum(used) + unused
        overall = [number / total for number in used]
        share_unused = unused / total
        rates = _rates(overall, share_unused)
        self.rates = [
            _rates(*_mixed(counts, missing, overall, share_unused)) if missing or any(counts) else rates
            for counts, missing in zip(self._used, self._unused, strict=True)
        ]
        self._unused = [MEMORY * number for number in self._unused]
        for counts in self._used:
            counts[:] = [MEMORY * number for number in counts]


def _mixed(
    used: list[float], unused: float, prior_used: list[float], prior_unused: float
) -> tuple[list[float], float]:
    """Adds :data:`PRIOR_STARTS` starts that are distributed as the prior."""
    mixed = [number + PRIOR_STARTS * share for number, share in zip(used, prior_used, strict=True)]
    return mixed, unused + PRIOR_STARTS * prior_unused


def _rates(used: list[float], unused: float) -> list[float]:
    rates = [0.0] * NUM_AGES
    num_left = unused
    last = max((bin_ for bin_ in range(NUM_AGES) if used[bin_] > 0.0), default=0)
    for first in range(last, -1, -1):
        num_left += used[first]
        best, num_used, waited, open_starts = 0.0, 0.0, 0.0, num_left
        before = _LOWEST[first] - 1.0
        for bin_ in range(first, last + 1):
            number = used[bin_]
            num_used += number
            open_starts -= number
            waited += number * (_MEAN[bin_] - before)
            rate = num_used / (waited + open_starts * (_HIGHEST[bin_] - before))
            if rate > best:
                best = rate
        rates[first] = best
    return rates


class LeavingRates:
    """Counts of prompts, and of those that were left, by bin of the distance from their end and by age: the
    number of requests in between. What :mod:`engine.memory.state_placement` has learned."""

    def __init__(self, num_bins: int) -> None:
        self._num_prompts = PRIOR_PROMPTS
        self._left = [[0.0] * NUM_AGES for _ in range(num_bins)]
        self._left[0][:PRIOR_BINS] = [PRIOR_LEFT_AT_END / PRIOR_BINS] * PRIOR_BINS
        self._next_refresh = 0
        self.stays: list[list[Stay]] = []
        """``stays[last][first]`` is the stay of a state that serves those who leave in the bins from
        ``first`` to ``last``. There are bins up to the last one in which a request has left."""
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


def best_stay(used: Sequence[float], unused: float) -> Stay:
    """Returns the chance that a new start is used, and the mean number of requests for which it is kept, if
    it is kept up to the age that gives most uses per request. ``used``: starts by age bin of their use."""
    total = open_starts = unused + sum(used)
    num_used, waited, best = 0.0, 0.0, 0.0
    stay = 0.0, 0.0
    for bin_, number in enumerate(used):
        if number > 0.0:
            num_used += number
            open_starts -= number
            waited += number * (_MEAN[bin_] + 1.0)
            kept = waited + open_starts * (_HIGHEST[bin_] + 1.0)
            if num_used > best * kept:
                best = num_used / kept
                stay = num_used / total, kept / total
    return stay
