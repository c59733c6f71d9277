"""Chooses at which lengths of a prompt states are kept, learned from where requests leave earlier prompts.

A request leaves an earlier prompt where its own tokens begin to differ. What is learned is how far before the
earlier prompt's end that was, in bins of powers of 2:

    blocks before the end   0           1        2 to 3   4 to 7   ...
    typical of              next turns  short questions   tools, templates, shared documents

A start that is 7 blocks before the end serves all requests that leave at most 7 blocks before it. So the last
block of each bin is a candidate. It is also learned after how many requests that was. So it is known how
likely a state is used, and for how long it has to be kept (:class:`engine.memory.reuse_rates.LeavingRates`):

    gain of a state = chance of its use * FLOP saved
                      - price * bytes that it needs * requests for which it is kept

The price is what the least valuable start of the cache saves with each byte and request
(:attr:`engine.memory.value_eviction.ValueEviction.price`). A prompt's last state also holds the prompt's new
KV, which would be given up first without it. The set of candidates with the highest gain is chosen, which may
be none; this is a dynamic program over at most 20 candidates, as in "Sparse Prefix Caching" (arXiv
2605.05219).

The place where this request leaves earlier ones always gets a state: another request may leave there too.
As long as nothing was given up for a state, states cost nothing: further ones are kept at fixed distances.

The keys of all candidates of recent prompts are remembered, kept or not. So what is learned does not depend
on what the cache has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from engine.memory.cached_start import Match, Place
from engine.memory.reuse_rates import LeavingRates
from engine.memory.start_sizes import StartSizes

NUM_BINS = 20
BRANCH_BIN = NUM_BINS
"""Stands for the place where a request left earlier ones."""
MAX_REMEMBERED = 65_536
"""Number of candidates whose keys are remembered: about 15 MB."""


@dataclass(frozen=True)
class Mark:
    """A length, in blocks, at which a state is to be kept."""

    num_blocks: int
    place: Place


class StatePlacement:
    """Learns from matches and marks prompts."""

    def __init__(
        self, sizes: StartSizes, price: Callable[[], float] = lambda: 0.0, *, spacing: int | None = None
    ) -> None:
        """``price``: FLOP that each byte of a state has to save per request. ``spacing``: number of blocks
        between the states that are kept besides while they cost nothing; None: none are."""
        self._sizes = sizes
        self._price = price
        self._spacing = spacing
        self._num_requests = 0
        self._rates = LeavingRates(NUM_BINS)
        self._remembered: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """Keys of candidates of recent prompts, each with its bin and the number of its request."""

    def mark(self, match: Match) -> list[Mark]:
        """Learns from a request that is admitted with this match, and returns the lengths at which its states
        are to be kept, the shortest first."""
        self._num_requests += 1
        start, end, price = len(match.nodes), len(match.keys), self._price()
        branch = self._branch(match)
        marks: dict[int, Mark] = {}
        if start < branch < end:
            marks[branch] = Mark(branch, Place.BRANCH)
            start = branch
        num_held = max(start, match.num_matched_blocks)
        for length, place in self._by_distance(start, num_held, end, price):
            marks[length] = Mark(length, place)
        if self._spacing is not None and price == 0.0:
            first = start - start % self._spacing + self._spacing
            for length in range(first, end, self._spacing):
                marks.setdefault(length, Mark(length, Place.before_end(end - length)))
        self._remember(match.keys, branch)
        return [marks[length] for length in sorted(marks)]

    def _branch(self, match: Match) -> int:
        """Learns where the request leaves an earlier one. Returns the length up to there, or 0 if it
        continues an earlier prompt's end: that branches off nowhere."""
        length, bin_ = self._learn(match.keys)
        branch = match.num_matched_blocks
        if bin_ == BRANCH_BIN:
            branch = max(branch, length)
        return 0 if bin_ == 0 and branch == length else branch

    def _learn(self, keys: list[bytes]) -> tuple[int, int]:
        """Counts the place where the request leaves an earlier one. Returns the last candidate of an earlier
        prompt that it has, and its bin; zeros: it has none."""
        found = 0, 0
        for length in range(len(keys), 0, -1):
            noted = self._remembered.get(keys[length - 1])
            if noted is not None:
                bin_, number = noted
                if bin_ != BRANCH_BIN:
                    self._rates.add_left(bin_, self._num_requests - number)
                found = length, bin_
                break
        self._rates.refresh(self._num_requests)
        return found

    def _remember(self, keys: list[bytes], branch: int) -> None:
        remembered, end = self._remembered, len(keys)
        self._rates.add_prompt()
        for bin_ in range(NUM_BINS):
            length = end - (1 << bin_) + 1
            if length <= branch:
                break
            remembered[keys[length - 1]] = bin_, self._num_requests
        if 0 < branch < end:
            remembered[keys[branch - 1]] = BRANCH_BIN, self._num_requests
            remembered.move_to_end(keys[branch - 1])
        while len(remembered) > MAX_REMEMBERED:
            remembered.popitem(last=False)

    def _by_distance(self, start: int, num_held: int, end: int, price: float) -> list[tuple[int, Place]]:
        """Returns the best set of candidates between a start and the prompt's end. The KV of ``num_held``
        blocks is kept without them too."""
        per_state, per_block = price * self._sizes.slot_bytes, price * self._sizes.block_bytes
        # best[i]: the highest gain of states for those that leave in the bins up to i, if candidate i is
        # kept, and the bin of the next state behind it.
        best: list[tuple[float, int]] = []
        for last, stays in enumerate(self._rates.stays):
            length = end - (1 << last) + 1
            if length <= start:
                break
            saved = self._sizes.flops(start, length)
            chance, kept = stays[0]
            cost = per_state + per_block * max(0, length - num_held)
            most, behind = chance * saved - kept * cost, -1
            for other in range(last):
                chance, kept = stays[other + 1]
                gain = best[other][0] + chance * saved - kept * per_state
                if gain > most:
                    most, behind = gain, other
            best.append((most, behind))
        chosen: list[tuple[int, Place]] = []
        bin_ = max(range(len(best)), key=lambda one: best[one][0], default=-1)
        if bin_ < 0 or best[bin_][0] <= 0.0:
            return chosen
        while bin_ >= 0:
            distance = (1 << bin_) - 1
            chosen.append((end - distance, Place.before_end(distance)))
            bin_ = best[bin_][1]
        return chosen
