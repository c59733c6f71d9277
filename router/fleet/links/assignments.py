"""The work that one router has at one server, and the server's load, corrected by this work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from router.fleet.links.capacity import PREFILL_STEPS, Resource
from router.fleet.links.circuit_breaker import CircuitBreaker, Trial
from router.fleet.links.prefix_index import PrefixIndex
from router.policies.policy import Load
from wire.messages.generation import ServerInfo, ServerStats

SILENT_S = 30.0
"""An engine that is silent for this long is taken to hang: engines answer between two steps, and a step takes
seconds at most."""
HELD_OPEN_S = 10.0
"""How long the breaker is held open after each question that a hanging engine left unanswered. It is longer
than the time until the next question."""


class Assignments:
    """Owns the server's circuit breaker and counts this router's requests and tokens there.

    The stats of a server are some hundred milliseconds old. Requests that this router has sent since then are
    not counted in them. But the router knows exactly how many of its own tokens are at the server now, and
    how many were there when it asked for the stats. So only the part of other routers is ever out of date.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.breaker = CircuitBreaker(clock)
        self.prefixes = PrefixIndex()
        self.num_requests = 0
        self.num_tokens = 0
        self.chosen_by: Counter[str] = Counter()
        """How many requests each policy has sent here since the start. The keys are the policies' names."""
        self._incarnation = ""
        self._computes_prompts = True
        self._block_size = 1
        self._stats: ServerStats | None = None
        self.told_s = 0.0
        """When the server last reported its stats, in seconds of the clock."""
        self._appeared_s = 0.0
        self._tokens_then = 0
        """This router's tokens at the server when it was asked for :attr:`stats`."""
        self._requests_then = 0
        self._max_num_seqs = 0
        self._max_batch_tokens = 0

    def appeared(self, info: ServerInfo) -> None:
        """Note that a server answers. Its stats and prefixes are not known yet. If it is another incarnation,
        the breaker is reset."""
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
        """Whether the server has reported its stats since it appeared."""
        return self._stats is not None

    @property
    def stats_age_s(self) -> float:
        """Seconds since the server reported its stats."""
        return self._clock() - self.told_s

    @property
    def stats(self) -> ServerStats | None:
        """The last stats that the server has reported since it appeared."""
        return self._stats

    def begin(self, num_tokens: int) -> Assignment:
        """Count a request of ``num_tokens`` tokens that is given to this server."""
        return Assignment(self, num_tokens, self.breaker.begin())

    def reported(self, stats: ServerStats, *, tokens_when_asked: int, requests_when_asked: int = 0) -> None:
        """Take the server's own stats. ``tokens_when_asked`` is :attr:`num_tokens` before the server was
        asked for them, ``requests_when_asked`` the number of this router's requests that had been sent
        there."""
        self._stats, self.told_s = stats, self._clock()
        self._tokens_then, self._requests_then = tokens_when_asked, requests_when_asked

    def not_told(self) -> bool:
        """Note that a connected server was asked for its stats and gave none. Return whether its engine
        hangs."""
        hangs = self._clock() - max(self.told_s, self._appeared_s) > SILENT_S
        if hangs:
            self.breaker.hold_open(HELD_OPEN_S)
        return hangs

    def load(self) -> Load:
        """Return the load now: this router's own requests by its current count, and the requests of other
        routers as the server last reported them."""
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
        """Number of routers that use the decode server, this router included."""
        return 1 if self._stats is None else max(1, self._stats.num_routers)

    @property
    def rows(self) -> Resource:
        """Rows of a decode server. Rows that this router's requests occupy count as free."""
        stats = self._stats
        num_there = 0 if stats is None else stats.num_running + stats.num_waiting
        return Resource(self._max_num_seqs, max(0, num_there - self._requests_then))

    @property
    def blocks(self) -> Resource | None:
        """Blocks of a decode server, in tokens. None until the server has reported its stats."""
        stats = self._stats
        if stats is None or not stats.num_blocks:
            return None
        used = (stats.num_blocks - stats.free_blocks) * self._block_size
        total = stats.num_blocks * self._block_size
        return Resource(total, max(0, used - self._tokens_then), self.num_tokens)

    @property
    def prefill_queue(self) -> Resource:
        """Tokens of prompts that wait on a prefill server or are being computed there."""
        others = 0 if self._stats is None else max(0, self._stats.queued_tokens - self._tokens_then)
        return Resource(PREFILL_STEPS * self._max_batch_tokens, others, self.num_tokens)


class Assignment:
    """One request at one server, from the choice of the server to the request's end."""

    def __init__(self, owner: Assignments, num_tokens: int, trial: Trial) -> None:
        self._owner = owner
        self._trial = trial
        self._num_tokens: int | None = num_tokens
        owner.num_requests += 1
        owner.num_tokens += num_tokens

    def unload(self) -> None:
        """Take the request off the server's load, because the server no longer works on it. Whether the
        server's work was good may not be known yet."""
        if self._num_tokens is not None:
            self._owner.num_requests -= 1
            self._owner.num_tokens -= self._num_tokens
            self._num_tokens = None

    def progressed(self) -> None:
        """Note that the server's work has proved to be good."""
        self._trial.progressed()

    def ended(self) -> None:
        self.unload()
        self._trial.ended()

    def failed(self) -> None:
        self.unload()
        self._trial.failed()
