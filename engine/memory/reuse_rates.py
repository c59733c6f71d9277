"""How often starts are used again, learned from a server's own requests.

Starts are divided into classes, such as "end of a prompt, used once". Age is the number of requests since a
start was last used. Two numbers are counted for each class and age: the starts that were used at that age,
and those that came to that age at all. This is the estimate of Kaplan and Meier ("Nonparametric Estimation
from Incomplete Observations", 1958): a start that still waits says that it was not used so far, and nothing
of later. A start that was given up goes on waiting, until it is missed or forgotten. So the counts say what
clients do, not what the cache had room for.

The rate of a class at an age is the most uses per request that keeping such a start can bring, if it is
kept up to the best age (the index of Gittins, "Bandit Processes and Dynamic Allocation Indices", 1979):

    rate(age) = max over end of  P(used by end) / mean requests until used or end

A start that is used soon or never has a high rate at first, which falls once it has waited too long. Classes
with few counts are drawn towards their group, such as "used once", and groups towards all starts together.

Prompts that begin alike are a family, such as all prompts behind one system prompt. Families differ in how
often their starts are used; :class:`FamilyReuse` learns by how much.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

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
FAMILY_TOKENS = 128
"""Prompts with these first tokens in common are a family."""
MAX_FAMILIES = 256
FAMILY_MEMORY = 0.98
"""Share of a family's counts that each further start leaves."""
FAMILY_PRIOR = 2.0
"""Number of used starts of an average family that a family's own starts are mixed with."""

_LOWEST = [0.0, *(float(1 << bin_ >> 1) for bin_ in range(1, NUM_AGES))]
_HIGHEST = [0.0, *(float((1 << bin_) - 1) for bin_ in range(1, NUM_AGES))]
_MEAN = [(low + high) / 2 for low, high in zip(_LOWEST, _HIGHEST, strict=True)]


def age_bin(age: int) -> int:
    return min(age.bit_length(), NUM_AGES - 1)


_OWN_PART = np.array([0.0, 0.0, *([0.5] * (NUM_AGES - 2))])
_IS_OWN = np.eye(NUM_AGES, dtype=bool)
_IS_LATER = np.triu(np.ones((NUM_AGES, NUM_AGES), dtype=bool), 1)
"""Whether the second bin's ages are higher than the first bin's. So are the next two."""
_WAIT_TO_END = np.maximum(1.0, np.array(_HIGHEST)[None, :] - np.array(_MEAN)[:, None])
_WAIT = np.where(_IS_OWN, _WAIT_TO_END / 2, np.array(_MEAN)[None, :] - np.array(_MEAN)[:, None])
_WAIT = np.maximum(1.0, _WAIT)
_WEIGHTS = [MEMORY ** (age / REFRESH) for age in _MEAN]
"""Of a start that has waited so long: as much as is left of the counts of that time."""

Shares = tuple[Sequence[float], float]
"""Shares of starts: those used at ages of each bin, and those that are never used."""


class MovingMean:
    """The mean of all values at first, and of about the last ``num_samples`` later."""

    def __init__(self, num_samples: int) -> None:
        self.mean = 0.0
        self._num, self._num_samples = 0, num_samples

    def add(self, value: float) -> None:
        self._num = min(self._num + 1, self._num_samples)
        self.mean += (value - self.mean) / self._num


class ReuseRates:
    """Counts of uses by class and age, and the rates that follow from them."""

    def __init__(self, groups: Sequence[int]) -> None:
        """``groups``: the group of each class, counted from 0."""
        self._groups = groups
        self._used = [[0.0] * NUM_AGES for _ in groups]
        self._forgotten = [[0.0] * NUM_AGES for _ in groups]
        self._next_refresh = FIRST_REFRESH
        share = 0.5 / PRIOR_BINS
        self._prior = [0.0, *([share] * PRIOR_BINS), *([0.0] * (NUM_AGES - PRIOR_BINS - 1))], 0.5
        self.rates = _rates([self._prior]) * len(groups)
        """Uses per request to be expected, by class and age bin."""
        self.chances = [0.5] * len(groups)
        """Shares of starts that are used at all, by class."""

    def used(self, start_class: int, age: int) -> None:
        """Counts a start that was used at this age."""
        self._used[start_class][age_bin(age)] += 1.0

    def forgotten(self, start_class: int, age: int) -> None:
        """Counts a start that was not used up to this age, and of which no more will be heard."""
        bin_ = age_bin(age)
        self._forgotten[start_class][bin_] += _WEIGHTS[bin_]

    def refresh(self, request_number: int, waiting: Callable[[], Mapping[tuple[int, int], int]]) -> None:
        """Computes the rates anew if it is time. ``waiting`` returns the number of starts that may still be
        used, kept or not, by class and age bin."""
        if request_number < self._next_refresh:
            return
        self._next_refresh = request_number + min(request_number, REFRESH)
        unused = [list(counts) for counts in self._forgotten]
        for (start_class, bin_), number in waiting().items():
            unused[start_class][bin_] += number * _WEIGHTS[bin_]
        counts = list(zip(self._used, unused, strict=True))
        together = _shares(*_sum(counts), self._prior)
        of_groups = []
        for group in range(max(self._groups) + 1):
            members = [one for one, its_group in zip(counts, self._groups, strict=True) if its_group == group]
            of_groups.append(_shares(*_sum(members), together))
        shares = [_shares(*one, of_groups[group]) for one, group in zip(counts, self._groups, strict=True)]
        self.rates = _rates(shares)
        self.chances = [1.0 - never for _, never in shares]
        for numbers in (*self._used, *self._forgotten):
            numbers[:] = [MEMORY * number for number in numbers]


class FamilyReuse:
    """How much more often a family's starts are used than all starts of their classes. Starts of one family
    are divided into few kinds."""

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[bytes, int], list[float]] = OrderedDict()
        """Of each family and kind: the starts that were used, and those expected to be."""

    def expect(self, family: bytes, kind: int, chance: float) -> None:
        """Counts a start that was used or given up, and of which ``chance`` uses were expected."""
        counts = self._counts.setdefault((family, kind), [0.0, 0.0])
        self._counts.move_to_end((family, kind))
        counts[:] = [FAMILY_MEMORY * number for number in counts]
        counts[1] += chance
        if len(self._counts) > MAX_FAMILIES:
            self._counts.popitem(last=False)

    def used(self, family: bytes, kind: int) -> None:
        """Counts that a start was used that was expected to be before."""
        counts = self._counts.get((family, kind))
        if counts is not None:
            counts[0] += 1.0

    def factor(self, family: bytes, kind: int) -> float:
        """Returns the uses of a family's starts as a part of those expected."""
        counts = self._counts.get((family, kind))
        return 1.0 if counts is None else (counts[0] + FAMILY_PRIOR) / (counts[1] + FAMILY_PRIOR)


def _sum(counts: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[list[float], list[float]]:
    used, unused = (zip(*numbers, strict=True) for numbers in zip(*counts, strict=True))
    return [sum(numbers) for numbers in used], [sum(numbers) for numbers in unused]


def _shares(used: Sequence[float], unused: Sequence[float], prior: Shares) -> Shares:
    """Returns the shares of all starts, with :data:`PRIOR_STARTS` that are distributed as the prior.

    ``used`` and ``unused``: numbers of starts that were used in each bin, and that waited into it and are not
    heard of any more."""
    shares, left, prior_left = [0.0] * NUM_AGES, 1.0, 1.0
    num_later = sum(used) + sum(unused) - used[0] - unused[0]
    for bin_ in range(1, NUM_AGES):
        num_later -= used[bin_] + unused[bin_]
        num_there = num_later + used[bin_] + unused[bin_] * (1.0 if bin_ == 1 else 0.5)
        there = num_there + PRIOR_STARTS * prior_left
        part = min(1.0, (used[bin_] + PRIOR_STARTS * prior[0][bin_]) / there) if there > 0.0 else 0.0
        prior_left -= prior[0][bin_]
        shares[bin_] = left * part
        left -= shares[bin_]
    return shares, left


def _rates(shares: Sequence[Shares]) -> list[list[float]]:
    """Returns the rate of each class at each age bin.

    A start of age bin ``first`` has half of that bin's uses behind it, on average, and at age 1 the only one.
    """
    used = np.array([one for one, _ in shares])
    own = used * _OWN_PART
    at_end = np.where(_IS_OWN, own[:, :, None], np.where(_IS_LATER, used[:, None, :], 0.0))
    num_used = np.cumsum(at_end, axis=2)
    waited = np.cumsum(at_end * _WAIT, axis=2)
    never = np.array([[[one]] for _, one in shares])
    num_open = never + num_used[:, :, -1:] - num_used
    rates = num_used / np.maximum(waited + num_open * _WAIT_TO_END, 1e-9)
    return [list(map(float, row)) for row in rates.max(axis=2)]
