"""Gives up the start that saves least for each byte that it holds.

    value of a start = weighed FLOP from the next shorter kept start * expected uses per request
                       / bytes that only this start holds: its state, and KV that leads to no other start

The weight (:meth:`engine.memory.start_sizes.StartSizes.weighed_flops`) makes one long wait count more than
several short ones that take as long together. Without it the slowest requests pay for all others.

Expected uses are learned (:mod:`engine.memory.reuse_rates`), in classes by where a start is, whether blocks
follow it, and how often it was used. Classes are few, because a small cache sees few uses. Starts are worth
more if those of their family of prompts are used more often than others of their classes. KV behind the last
start of a branch saves nothing and goes first.

Starts wait in queues of one class and nearly equal worth (FLOP for each byte, in steps of half a power of 2).
Within a queue the start that was used least recently stands in front. Only both ends of each queue are looked
at: the front if starts are used soon or never, the back if all of them are used after a pause, and the cache
is too small for all. A start's worth can change while it waits, for example if the next shorter start is
given up: it is measured again before it is given up.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass

from engine.memory.cached_start import CachedBlock, CachedState, Match, Place
from engine.memory.eviction import LeafHeap
from engine.memory.reuse_rates import FAMILY_TOKENS, FamilyReuse, MovingMean, ReuseRates, age_bin
from engine.memory.start_sizes import StartSizes

MAX_HITS_DIGITS = 6
NUM_HITS_BINS = MAX_HITS_DIGITS + 1
_KIND_OF_PLACE = [min(place, 1) + max(0, place - Place.NEAR_32) for place in Place]
"""Places near an end are one kind. The other kinds are ends, other places inside, and branches."""
NUM_CLASSES = (max(_KIND_OF_PLACE) + 1) * 2 * NUM_HITS_BINS
_GROUPS = [start_class // 2 % NUM_HITS_BINS for start_class in range(NUM_CLASSES)]
"""Classes of starts that were used equally often are a group."""
NUM_WORTHS = 128
"""Bins of FLOP per byte: powers of 2 ** 0.5 from 1 up."""
_WORTHS = [2.0 ** (bin_ / 2) for bin_ in range(NUM_WORTHS)]
MIN_PAST_STARTS = 1024
PAST_FACTOR = 4
"""As many given-up starts are remembered as this factor times the kept ones."""
PRICE_SAMPLES = 50
"""Number of the last evictions, or waits, that the price follows from."""


@dataclass(slots=True)
class _PastStart:
    """A start that was given up, to learn whether it is missed."""

    start_class: int
    num_hits: int
    last_request: int
    family: bytes
    is_expected: bool = True
    """Whether its family's counts expect its next use already."""


class ValueEviction:
    """Orders starts by value. ``shares_memory``: blocks and states use the same bytes, as in host memory, so
    that either can make room for the other."""

    def __init__(self, sizes: StartSizes, *, shares_memory: bool = False) -> None:
        self._sizes = sizes
        self._shares_memory = shares_memory
        self._reuse = ReuseRates(_GROUPS)
        self._families = FamilyReuse()
        self._tails = LeafHeap()
        """Idle leaves without a state."""
        self._queues: dict[int, OrderedDict[CachedState, None]] = {}
        self._parked: OrderedDict[CachedState, None] = OrderedDict()
        """Idle states that were asked for a block while a request held their blocks."""
        self._past: OrderedDict[bytes, _PastStart] = OrderedDict()
        self._kept: dict[CachedState, None] = {}
        self._num_requests = 0
        self._score, self._waits = MovingMean(PRICE_SAMPLES), MovingMean(PRICE_SAMPLES)

    @property
    def price(self) -> float:
        """Weighed FLOP that each byte of a new start has to be expected to save, so that it is worth what is
        given up for it. 0 while nothing was given up."""
        return self._score.mean * self._waits.mean

    # --- events ----------------------------------------------------------------------------------

    def used(self, match: Match) -> None:
        self._num_requests += 1
        now, state = self._num_requests, match.state
        self._count_missed(match)
        if state is not None:
            self._wait(state.num_hits, now - state.last_request)
            self._count_used(_class_of(state), now - state.last_request, state.family, is_expected=False)
            state.num_hits += 1
            state.last_request = now
        self._reuse.refresh(now, self._waiting)

    def kept(self, state: CachedState) -> None:
        self._kept[state] = None
        state.last_request = self._num_requests
        past = self._past.pop(state.node.key, None)
        if past is not None:
            state.num_hits = past.num_hits
        shorter, _ = start_neighbours(state)
        state.family = self._family_of(state.node, shorter)
        if shorter is not None and shorter.queue >= 0:
            self._queue(shorter)

    def _family_of(self, node: CachedBlock, shorter: CachedState | None) -> bytes:
        """Returns the key of the block that ends the first :data:`FAMILY_TOKENS` tokens."""
        num_blocks = max(1, FAMILY_TOKENS // self._sizes.block_tokens)
        if shorter is not None and shorter.node.num_blocks >= num_blocks:
            return shorter.family
        while node.num_blocks > num_blocks and node.parent is not None:
            node = node.parent
        return node.key

    def offer_block(self, node: CachedBlock) -> None:
        if node.state is None:
            self._tails.offer(node)
        elif node.state in self._parked and node.is_idle_leaf:
            self._queue(node.state)

    def offer_state(self, state: CachedState) -> None:
        self._queue(state)

    def dropped(self, state: CachedState) -> None:
        del self._kept[state]
        self._unqueue(state)
        start_class = _class_of(state)
        self._wait(state.num_hits, self._num_requests - state.last_request)
        self._families.expect(state.family, _kind_of(start_class), self._reuse.chances[start_class])
        past = _PastStart(start_class, state.num_hits, state.last_request, state.family)
        self._past[state.node.key] = past
        if len(self._past) > max(MIN_PAST_STARTS, PAST_FACTOR * len(self._kept)):
            _, past = self._past.popitem(last=False)
            self._reuse.forgotten(past.start_class, self._num_requests - past.last_request)

    def value(self, state: CachedState) -> float:
        start_class, worth = divmod(self._index_of(state), NUM_WORTHS)
        age = age_bin(self._num_requests - state.last_request)
        return float(self._reuse.rates[start_class][age] * _WORTHS[worth])

    def _count_missed(self, match: Match) -> None:
        """Counts the deepest start that was given up and that the request could have used."""
        for key in reversed(match.keys[len(match.nodes) :]):
            past = self._past.get(key)
            if past is None:
                continue
            age = self._num_requests - past.last_request
            self._wait(past.num_hits, age)
            self._count_used(past.start_class, age, past.family, is_expected=past.is_expected)
            past.num_hits, past.last_request, past.is_expected = past.num_hits + 1, self._num_requests, False
            past.start_class = _class(
                past.start_class // 2 // NUM_HITS_BINS, past.num_hits, bool(past.start_class & 1)
            )
            return

    def _count_used(self, start_class: int, age: int, family: bytes, *, is_expected: bool) -> None:
        self._reuse.used(start_class, age)
        kind = _kind_of(start_class)
        if not is_expected:
            self._families.expect(family, kind, self._reuse.chances[start_class])
        self._families.used(family, kind)

    def _waiting(self) -> Counter[tuple[int, int]]:
        """Returns the number of all starts that are kept or remembered, by class and age bin."""
        now = self._num_requests
        waiting = Counter((_class_of(one), age_bin(now - one.last_request)) for one in self._kept)
        waiting.update((one.start_class, age_bin(now - one.last_request)) for one in self._past.values())
        return waiting

    def _wait(self, num_hits: int, age: int) -> None:
        """Learns how many requests pass before a start is used for the first time."""
        if num_hits == 0:
            self._waits.add(age)

    # --- choosing --------------------------------------------------------------------------------

    def next_block(self) -> CachedBlock | CachedState:
        tail = self._tails.pop()
        if tail is not None:
            return tail
        if self._shares_memory:
            return self._least(of_leaves=False)
        return self._least(of_leaves=True).node

    def next_state(self) -> CachedBlock | CachedState:
        if self._shares_memory:
            tail = self._tails.pop()
            if tail is not None:
                return tail
        return self._least(of_leaves=False)

    def _least(self, *, of_leaves: bool) -> CachedState:
        """Returns the idle start of least value; with ``of_leaves`` one whose block is an idle leaf."""
        while True:
            found = self._cheapest(of_leaves)
            if found is None:
                return self._any(of_leaves)
            state, index, score = found
            if state.num_users:
                self._unqueue(state)
            elif self._index_of(state) != index:
                self._queue(state)
            elif of_leaves and not state.node.is_idle_leaf:
                self._unqueue(state)
                self._parked[state] = None
            else:
                self._score.add(score)
                return state

    def _cheapest(self, of_leaves: bool) -> tuple[CachedState, int, float] | None:
        """Returns the start of least value among the ends of all queues, its queue and its value."""
        rates, now = self._reuse.rates, self._num_requests
        least, best, in_queue = math.inf, None, -1
        for index, queue in self._queues.items():
            start_class, worth = divmod(index, NUM_WORTHS)
            if of_leaves and start_class & 1:
                continue
            of_class = rates[start_class]
            state = next(iter(queue))
            rate = of_class[age_bin(now - state.last_request)]
            if len(queue) > 1:
                newest = next(reversed(queue))
                of_newest = of_class[age_bin(now - newest.last_request)]
                if of_newest < rate:
                    state, rate = newest, of_newest
            value = rate * _WORTHS[worth]
            if value < least:
                least, best, in_queue = value, state, index
        return None if best is None else (best, in_queue, least)

    def _any(self, of_leaves: bool) -> CachedState:
        """Returns an idle start that no queue shows as one. Seldom needed."""
        waiting = [*self._parked, *(state for queue in self._queues.values() for state in queue)]
        for state in waiting:
            if state.num_users == 0 and (not of_leaves or state.node.is_idle_leaf):
                return state
        raise RuntimeError("the cache counts an idle start that was not offered")

    # --- queues ----------------------------------------------------------------------------------

    def _queue(self, state: CachedState) -> None:
        """Puts a start at the end of its queue."""
        self._unqueue(state)
        state.queue = self._index_of(state)
        self._queues.setdefault(state.queue, OrderedDict())[state] = None

    def _unqueue(self, state: CachedState) -> None:
        if state.queue >= 0:
            queue = self._queues[state.queue]
            del queue[state]
            if not queue:
                del self._queues[state.queue]
            state.queue = -1
        self._parked.pop(state, None)

    def _index_of(self, state: CachedState) -> int:
        shorter, num_alone = start_neighbours(state)
        start = 0 if shorter is None else shorter.node.num_blocks
        saved = self._sizes.weighed_flops(start, state.node.num_blocks)
        num_bytes = self._sizes.slot_bytes + num_alone * self._sizes.block_bytes
        start_class = _class_of(state)
        saved *= self._families.factor(state.family, _kind_of(start_class))
        worth = int(2 * math.log2(max(1.0, saved / num_bytes)))
        return start_class * NUM_WORTHS + min(worth, NUM_WORTHS - 1)


def _class_of(state: CachedState) -> int:
    return _class(_KIND_OF_PLACE[state.place], state.num_hits, state.node.num_children > 0)


def _class(kind: int, num_hits: int, has_children: bool) -> int:
    """Returns the class of a start. It is odd if blocks follow the start."""
    return (kind * NUM_HITS_BINS + min(num_hits.bit_length(), MAX_HITS_DIGITS)) * 2 + has_children


def _kind_of(start_class: int) -> int:
    """Returns the kind of a start within its family: by its place, and whether it was used before."""
    kind, hits = divmod(start_class // 2, NUM_HITS_BINS)
    return 2 * kind + (hits > 0)


def start_neighbours(state: CachedState) -> tuple[CachedState | None, int]:
    """Returns the next shorter start, and the number of blocks that only this start holds."""
    node = state.node
    is_alone = node.num_children == 0
    num_alone = int(is_alone)
    before = node.parent
    while before is not None and before.state is None:
        if is_alone:
            is_alone = before.num_children == 1
            num_alone += is_alone
        before = before.parent
    return (None if before is None else before.state), num_alone
