"""How often starts are used again, learned from a server's own requests.

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

_LOWEST = [0.0, *(float(1 << bin_ >> 1) for bin_ in range(1, NUM_AGES))]
_HIGHEST = [0.0, *(float((1 << bin_) - 1) for bin_ in range(1, NUM_AGES))]
_MEAN = [(low + high) / 2 for low, high in zip(_LOWEST, _HIGHEST, strict=True)]


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
