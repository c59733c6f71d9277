"""Chooses at which lengths of a prompt states are kept, learned from where requests leave earlier prompts.

A request leaves an earlier prompt where its own tokens begin to differ. What is learned is how far before the
earlier prompt's end that was, in bins of powers of 2:

    blocks before the end   0           1        2 to 3   4 to 7   ...
    typical of              next turns  short questions   tools, templates, shared documents

A start that is 7 blocks before the end serves all requests that leave at most 7 blocks before it. So the last
block of each bin is a candidate. Chosen is the set of candidates that is expected to save most, less a price
of its states; this is a dynamic program over at most 20 candidates, as in "Sparse Prefix Caching"
(arXiv 2605.05219). The price follows from what the cache gives up for a state
(:attr:`engine.memory.value_eviction.ValueEviction.price`). It is higher where prompts are long: what
continues a long prompt keeps its next state only when it has grown by enough, and starts from the last one
until then.

States are also kept at all places on the way where requests left earlier ones: other requests may leave
there too. As long as nothing was given up for a state, states cost nothing: further ones are kept at fixed
distances.

The keys of all candidates of recent prompts are remembered, kept or not. So what is learned does not depend
on what the cache has. Chances are learned for each family of prompts (:mod:`engine.memory.reuse_rates`), and
drawn to those of all prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from engine.memory.cached_start import Match, Place
from engine.memory.reuse_rates import FAMILY_TOKENS, MAX_FAMILIES, MovingMean
from engine.memory.start_sizes import StartSizes

NUM_BINS = 20
MEMORY = 0.995
"""Share of the counts that each request leaves. So about the last 200 requests count."""
FAMILY_MEMORY = 0.98
"""Share of a family's counts that each of its requests leaves."""
FAMILY_PRIOR = 4.0
"""Number of all prompts that a family's own are mixed with."""
PRIOR_PROMPTS = 4.0
PRIOR_LEFT_AT_END = 2.0
"""Before anything is learned, every second prompt is expected to be continued at its end."""
FIRST_PRICE_OF_A_STATE, MAX_FIRST_PRICE = 1.5, 5.0
"""Times the price that a prompt's first state has to save: if the KV of a mean prompt weighs as much as a
state, and at most. It grows with the square of the mean prompt. Where prompts are short, a first state that
is worth little is given up soon."""
FIRST_PRICE_OF_MOVED = 0.1
"""The same if what is given up is not lost, but moves to host memory."""
MORE_PRICE = 16.0
"""Times the price that each further state of a prompt has to save. It competes with the first."""
MEAN_PROMPTS = 200
"""Number of the last prompts that the mean prompt is made of, about."""
BRANCH_BIN = NUM_BINS
"""Stands for the place where a request left earlier ones."""
MAX_BRANCHES = 8
"""Number of remembered branches of a prompt that get states, the deepest ones. So no client can make others'
starts go by branches at every block. The logs of docs/cache-policies.md have at most 6 in a prompt."""
MAX_REMEMBERED = 65_536
"""Number of candidates whose keys are remembered: about 10 MB."""


@dataclass(frozen=True)
class Mark:
    """A length, in blocks, at which a state is to be kept."""

    num_blocks: int
    place: Place


class LeftCounts:
    """How many prompts there were, and how many were left in each bin."""

    def __init__(self, memory: float, num_prompts: float = 0.0, left_at_end: float = 0.0) -> None:
        self._memory = memory
        self.num_prompts = num_prompts
        self.left = [left_at_end, *([0.0] * (NUM_BINS - 1))]

    def add(self, bin_: int | None) -> None:
        """Counts a prompt that left an earlier one in this bin, or in none."""
        self.left = [self._memory * number for number in self.left]
        self.num_prompts = self._memory * self.num_prompts + 1.0
        if bin_ is not None:
            self.left[bin_] += 1.0


class StatePlacement:
    """Learns from matches and marks prompts."""

    def __init__(
        self,
        sizes: StartSizes,
        price: Callable[[], float] = lambda: 0.0,
        *,
        spacing: int | None = None,
        moves_down: bool = False,
    ) -> None:
        """``spacing``: number of blocks between the states that are kept besides while they cost nothing;
        None: none are. ``moves_down``: what the cache gives up moves to host memory."""
        self._sizes = sizes
        self._price = price
        self._spacing = spacing
        self._moves_down = moves_down
        self._prompt_blocks = MovingMean(MEAN_PROMPTS)
        self._all = LeftCounts(MEMORY, PRIOR_PROMPTS, PRIOR_LEFT_AT_END)
        self._families: OrderedDict[bytes, LeftCounts] = OrderedDict()
        self._remembered: OrderedDict[bytes, int] = OrderedDict()
        """Keys of candidates of recent prompts, each with its bin."""

    def mark(self, match: Match) -> list[Mark]:
        """Learns from a request that is admitted with this match, and returns the lengths at which its states
        are to be kept, the shortest first."""
        start, end = len(match.nodes), len(match.keys)
        if not end:
            return []
        self._prompt_blocks.add(end)
        family = self._family(match.keys)
        left, bin_ = self._left(match.keys)
        for counts in (self._all, family):
            counts.add(None if bin_ == BRANCH_BIN else bin_)
        branch = max(match.num_matched_blocks, left if bin_ else 0)
        if self._remembered.get(match.keys[branch - 1] if branch else b"") == 0:
            branch = 0  # what continues an earlier prompt's end branches off nowhere
        price = self._price() * self._sizes.slot_bytes
        chances = self._chances(family)
        marks = {
            length: Mark(length, place) for length, place in self._by_distance(start, end, price, chances)
        }
        if self._spacing is not None and price == 0.0:
            first = start - start % self._spacing + self._spacing
            for length in range(first, end, self._spacing):
                marks.setdefault(length, Mark(length, Place.before_end(end - length)))
        for length in self._branches(match.keys, start) | {branch}:
            if start < length < end:
                marks[length] = Mark(length, Place.BRANCH)
        self._remember(match.keys, branch)
        return [marks[length] for length in sorted(marks)]

    def _family(self, keys: list[bytes]) -> LeftCounts:
        num_blocks = max(1, FAMILY_TOKENS // self._sizes.block_tokens)
        key = keys[min(num_blocks, len(keys)) - 1]
        counts = self._families.setdefault(key, LeftCounts(FAMILY_MEMORY))
        self._families.move_to_end(key)
        if len(self._families) > MAX_FAMILIES:
            self._families.popitem(last=False)
        return counts

    def _left(self, keys: list[bytes]) -> tuple[int, int | None]:
        """Returns the length in blocks up to which a prompt is known to be an earlier one, and the bin of the
        place where it leaves that; 0 and None if it is like no earlier one."""
        for length in range(len(keys), 0, -1):
            bin_ = self._remembered.get(keys[length - 1])
            if bin_ is not None:
                return length, bin_
        return 0, None

    def _branches(self, keys: list[bytes], start: int) -> set[int]:
        """Returns the deepest places behind ``start`` where requests have left earlier ones."""
        get, lengths = self._remembered.get, range(len(keys) - 1, start, -1)
        return set(islice((one for one in lengths if get(keys[one - 1]) == BRANCH_BIN), MAX_BRANCHES))

    def _chances(self, family: LeftCounts) -> list[float]:
        """Returns the chances that prompts of a family are left in each bin."""
        per_prompt = FAMILY_PRIOR / self._all.num_prompts
        return [
            (number + per_prompt * of_all) / (family.num_prompts + FAMILY_PRIOR)
            for number, of_all in zip(family.left, self._all.left, strict=True)
        ]

    @property
    def _first_price(self) -> float:
        """Times the price that a prompt's first state has to save."""
        if self._moves_down:
            return FIRST_PRICE_OF_MOVED
        states = self._prompt_blocks.mean / self._sizes.blocks_per_state
        return min(MAX_FIRST_PRICE, FIRST_PRICE_OF_A_STATE * states**2)

    def _remember(self, keys: list[bytes], branch: int) -> None:
        remembered, end = self._remembered, len(keys)
        for bin_ in range(NUM_BINS):
            length = end - (1 << bin_) + 1
            if length <= branch:
                break
            remembered[keys[length - 1]] = bin_
        if 0 < branch < end:
            remembered[keys[branch - 1]] = BRANCH_BIN
            remembered.move_to_end(keys[branch - 1])
        while len(remembered) > MAX_REMEMBERED:
            remembered.popitem(last=False)

    def _by_distance(
        self, start: int, end: int, price: float, chances: list[float]
    ) -> list[tuple[int, Place]]:
        """Returns the best set of candidates between the cached prefix's end and the prompt's end."""
        distances = []
        for bin_ in range(NUM_BINS):
            if end - (distance := (1 << bin_) - 1) <= start:
                break
            distances.append(distance)
        # best[i]: the most that requests can save that leave in the bins up to i, if candidate i is kept.
        total = 0.0
        left_up_to = []
        for bin_ in range(len(distances)):
            total += chances[bin_]
            left_up_to.append(total)
        best: list[tuple[float, int]] = []
        first_price, more_price = self._first_price * price, MORE_PRICE * price
        for i, distance in enumerate(distances):
            saved = self._sizes.flops(start, end - distance)
            most, before = left_up_to[i] * saved - first_price, -1
            for j in range(i):
                gain = best[j][0] + (left_up_to[i] - left_up_to[j]) * saved - more_price
                if gain > most:
                    most, before = gain, j
            best.append((most, before))
        chosen: list[tuple[int, Place]] = []
        i = max(range(len(best)), key=lambda index: best[index][0], default=-1)
        if i < 0 or best[i][0] <= 0.0:
            return chosen
        while i >= 0:
            chosen.append((end - distances[i], Place.before_end(distances[i])))
            i = best[i][1]
        return chosen
