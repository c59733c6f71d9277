"""What one router has under way at one server, and what that makes of the server's own figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from router.fleet.links.capacity import PREFILL_STEPS, Resource
from router.fleet.links.circuit_breaker import CircuitBreaker, Trial
from router.fleet.links.prefix_index import PrefixIndex
from router.policies.policy import Load
from wire.messages.generation import ServerInfo, ServerStats

SILENT_S = 30.0
"""Engines answer between two steps, which take seconds at most: one that says nothing for so long hangs."""
HELD_OPEN_S = 10.0
"""After each time that it was asked in vain; longer than it takes to ask again."""


class Assignments:
    """Owns the server's circuit breaker and counts the tokens of requests that are there.

    A server's figures are some hundred milliseconds old, and the requests that this router sent since are not
    among them. But how many are its own, then and now, it knows exactly: only what others sent is ever stale.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.breaker = CircuitBreaker(clock)
        self.prefixes = PrefixIndex()
        self.num_requests = 0
        self.num_tokens = 0
        self.chosen_by: Counter[str] = Counter()
        """Requests since the start that a policy sent here, by its name."""
        self._incarnation = ""
        self._computes_prompts = True
        self._block_size = 1
        self._stats: ServerStats | None = None
        self.told_s = 0.0
        """When that was, by the clock."""
        self._appeared_s = 0.0
        self._tokens_then = 0
        """Own tokens at the server when it was asked for :attr:`stats`."""
        self._requests_then = 0
        self._max_num_seqs = 0
        self._max_batch_tokens = 0

    def appeared(self, info: ServerInfo) -> None:
        """A server answers; nothing that was known of an earlier life holds for it."""
        if info.incarnation != self._incarnation:
            self.breaker.reset()
        self._incarnation = info.incarnation
        self.prefixes.appeared(info)
        self._stats, self._appeared_s = None, self._clock()
        self._block_size = info.block_size
        self._max_num_seqs = info.max_num_seqs
        self._max_batch_tokens = info.max_batch_tokens
        self._computes_prompts = info.role != "decode"

    @property
    def has_stats(self) -> bool:
        """Whether the server has told its load since it appeared."""
        return self._stats is not None

    @property
    def stats_age_s(self) -> float:
        """Seconds since the server has told its load."""
        return self._clock() - self.told_s

    @property
    def stats(self) -> ServerStats | None:
        """What the server has told last since it appeared."""
        return self._stats

    def begin(self, num_tokens: int) -> Assignment:
        """A request of so many tokens was given to this server."""
        return Assignment(self, num_tokens, self.breaker.begin())

    def reported(self, stats: ServerStats, *, tokens_when_asked: int, requests_when_asked: int = 0) -> None:
        """The server's own figures; ``tokens_when_asked``: :attr:`num_tokens` before they were asked for;
        ``requests_when_asked``: requests of this router that had been sent there."""
        self._stats, self.told_s = stats, self._clock()
        self._tokens_then, self._requests_then = tokens_when_asked, requests_when_asked

    def not_told(self) -> bool:
        """The server is connected, was asked for its figures and gave none; says whether its engine hangs."""
        hangs = self._clock() - max(self.told_s, self._appeared_s) > SILENT_S
        if hangs:
            self.breaker.hold_open(HELD_OPEN_S)
        return hangs

    def load(self) -> Load:
        """The load now: own requests as they are, those of others as they were."""
        if self._stats is None:
            queued = self.num_tokens if self._computes_prompts else 0
            return Load(queued, free_tokens=-self.num_tokens)
        stats = self._stats
        queued = stats.queued_tokens
        if self._computes_prompts:
            queued = max(0, queued - self._tokens_then) + self.num_tokens
        return Load(
            queued_tokens=queued,
            free_tokens=stats.free_blocks * self._block_size - (self.num_tokens - self._tokens_then),
            total_tokens=stats.num_blocks * self._block_size,
        )

    @property
    def num_routers(self) -> int:
        """That use a decode server, this one included."""
        return 1 if self._stats is None else max(1, self._stats.num_routers)

    @property
    def rows(self) -> Resource:
        """Of a decode server; those that this router's requests have are not told apart from free ones."""
        stats = self._stats
        num_there = 0 if stats is None else stats.num_running + stats.num_waiting
        return Resource(self._max_num_seqs, max(0, num_there - self._requests_then))

    @property
    def blocks(self) -> Resource | None:
        """Of a decode server, in tokens; None until it has told."""
        stats = self._stats
        if stats is None or not stats.num_blocks:
            return None
        used = (stats.num_blocks - stats.free_blocks) * self._block_size
        total = stats.num_blocks * self._block_size
        return Resource(total, max(0, used - self._tokens_then), self.num_tokens)

    @property
    def prefill_queue(self) -> Resource:
        """Of a prefill server: tokens of prompts that wait there or are being computed."""
        others = 0 if self._stats is None else max(0, self._stats.queued_tokens - self._tokens_then)
        return Resource(PREFILL_STEPS * self._max_batch_tokens, others, self.num_tokens)


class Assignment:
    """One request at one server, from its choice to its end."""

    def __init__(self, owner: Assignments, num_tokens: int, trial: Trial) -> None:
        self._owner = owner
        self._trial = trial
        self._num_tokens: int | None = num_tokens
        owner.num_requests += 1
        owner.num_tokens += num_tokens

    def unload(self) -> None:
        """The server has done its work; how that turns out is to be seen."""
        if self._num_tokens is not None:
            self._owner.num_requests -= 1
            self._owner.num_tokens -= self._num_tokens
            self._num_tokens = None

    def progressed(self) -> None:
        """What the server did has proved to be good."""
        self._trial.progressed()

    def ended(self) -> None:
        self.unload()
        self._trial.ended()

    def failed(self) -> None:
        self.unload()
        self._trial.failed()
