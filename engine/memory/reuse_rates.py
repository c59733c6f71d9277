"""How often starts are used again, learned from a server's own requests.

Starts are divided into classes, such as "end of a prompt, used once". For each class the ages at which starts
were used again are counted, and how many were not. Age is the number of requests since a start was last used.
A start that was given up and missed later counts as used, at its true age. So the counts say what clients do,
not what the cache had room for.

The rate of a class at an age is the most uses per request that keeping such a start can bring, if it is
kept up to the best age (the index of Gittins, "Bandit Processes and Dynamic Allocation Indices", 1979):

    rate(age) = max over end of  P(used by end) / mean requests until used or end

A start that is used soon or never has a high rate at first, which falls once it has waited too long. Classes
with few counts are drawn towards their group, such as "used once", and groups towards all starts together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NUM_AGES = 22
"""Age bin ``b`` holds the ages of ``b`` binary digits, so 0, 1, 2 to 3, 4 to 7 and so on."""
MEMORY = 0.9
"""Share of the counts that is kept when rates are computed anew. Older requests so count less and less."""
FIRST_REFRESH, REFRESH = 16, 256
"""Rates are computed after so many requests at first, and later."""
PRIOR_STARTS = 4.0
"""Number of starts that a group counts for in the rates of a class, and all groups together in those of a
group."""
PRIOR_BINS = 11
"""Before anything is learned, half of all starts are expected to be used, equally likely in each of the first
bins."""

_LOWEST = [0.0, *(float(1 << bin_ >> 1) for bin_ in range(1, NUM_AGES))]
_HIGHEST = [0.0, *(float((1 << bin_) - 1) for bin_ in range(1, NUM_AGES))]
_MEAN = [(low + high) / 2 for low, high in zip(_LOWEST, _HIGHEST, strict=True)]


def age_bin(age: int) -> int:
    return min(age.bit_length(), NUM_AGES - 1)


Counts = tuple[Sequence[float], float]
"""Numbers of starts, or shares of them: those used at ages of each bin, and those that were not used."""


class ReuseRates:
    """Counts of uses by class and age, of starts that were not used, and the rates that follow from them."""

    def __init__(self, groups: Sequence[int]) -> None:
        """``groups``: the group of each class, counted from 0."""
        self._groups = groups
        self._used = [[0.0] * NUM_AGES for _ in groups]
        self._unused = [0.0] * len(groups)
        self._next_refresh = FIRST_REFRESH
        self._prior = [0.5 / PRIOR_BINS] * PRIOR_BINS + [0.0] * (NUM_AGES - PRIOR_BINS), 0.5
        self.rates = [_rates(*self._prior)] * len(groups)
        """Uses per request to be expected, by class and age bin."""

    def used(self, start_class: int, age: int) -> None:
        """Counts a start that was used at this age."""
        self._used[start_class][age_bin(age)] += 1.0

    def ended(self, start_class: int) -> None:
        """Counts a start that was given up."""
        self._unused[start_class] += 1.0

    def used_after_end(self, start_class: int, age: int) -> None:
        """Counts a start as used that was given up and was missed at ``age``."""
        self._unused[start_class] = max(0.0, self._unused[start_class] - 1.0)
        self.used(start_class, age)

    def refresh(self, request_number: int) -> None:
        """Computes the rates anew if it is time."""
        if request_number < self._next_refresh:
            return
        self._next_refresh = request_number + min(request_number, REFRESH)
        together = _drawn(*self._counts(range(len(self._groups))), self._prior)
        of_groups: list[Counts] = []
        for group in range(max(self._groups) + 1):
            members = [one for one, its_group in enumerate(self._groups) if its_group == group]
            of_groups.append(_drawn(*self._counts(members), together))
        group_rates = [_rates(*shares) for shares in of_groups]
        self.rates = [
            _rates(*_drawn(used, unused, of_groups[group])) if unused or any(used) else group_rates[group]
            for group, used, unused in zip(self._groups, self._used, self._unused, strict=True)
        ]
        self._unused = [MEMORY * number for number in self._unused]
        for counts in self._used:
            counts[:] = [MEMORY * number for number in counts]

    def _counts(self, classes: Iterable[int]) -> Counts:
        """Returns the counts of some classes together."""
        members = list(classes)
        used = [sum(numbers) for numbers in zip(*(self._used[one] for one in members), strict=True)]
        return used, sum(self._unused[one] for one in members)


def _drawn(used: Sequence[float], unused: float, prior: Counts) -> Counts:
    """Returns the shares of all starts, with :data:`PRIOR_STARTS` that are distributed as the prior."""
    total = sum(used) + unused + PRIOR_STARTS
    shares = [(number + PRIOR_STARTS * share) / total for number, share in zip(used, prior[0], strict=True)]
    return shares, (unused + PRIOR_STARTS * prior[1]) / total


def _rates(used: Sequence[float], unused: float) -> list[float]:
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
