"""What the router has seen in the last minute, for people who watch the router. Prometheus does not need
this: it computes its own windows."""

from __future__ import annotations

import time
from collections.abc import Callable

from router.observe.window import WINDOW_S, WindowHistogram, WindowSum
from wire.messages.generation import RequestStats

MAX_WORKERS = 1024
"""Maximum number of servers that are counted apart. Servers may come and go for months."""


class LastMinute:
    """Counts each choice when it finishes, its TTFT when its first token comes, and each HTTP request when it
    ends. Generated tokens are counted elsewhere (:attr:`TokenMetrics.recent`)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_s = clock()
        self.requests = WindowSum()
        """HTTP requests that were let in and have ended in any way."""
        self.prompt_tokens = WindowSum()
        self.cached_tokens = WindowSum()
        """Prompt tokens that a prefix cache held."""
        self.transfer_bytes = WindowSum()
        self.tokens_with_drafts = WindowSum()
        self.accepted_tokens = WindowSum()
        self.ttft = WindowHistogram()
        self.tpot = WindowHistogram()
        """A choice's time from its first token to its last, divided by the number of tokens after the
        first."""
        self.transfer = WindowHistogram()
        self._by_worker: dict[str, tuple[WindowSum, WindowSum]] = {}
        """Prompt tokens and cached tokens by the server that prefilled them."""

    @property
    def now_s(self) -> float:
        return self._clock()

    def covered_s(self, now_s: float) -> float:
        """Return how many seconds the sums cover now. Of the current second, only the part that has passed
        counts."""
        return max(0.001, min(now_s - self._started_s, WINDOW_S - 1 + now_s % 1))

    def choice_ended(
        self,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_tokens: int,
        decode_s: float,
        stats: RequestStats | None,
        worker: str = "",
    ) -> None:
        """Count a choice that has finished. ``decode_s`` is the time from its first token to its last,
        ``worker`` the id of the server that prefilled it."""
        now_s = self._clock()
        if worker:
            self._count_worker(worker, num_prompt_tokens, num_cached_tokens, now_s)
        self.prompt_tokens.add(num_prompt_tokens, now_s)
        self.cached_tokens.add(num_cached_tokens, now_s)
        if num_tokens > 1:
            self.tpot.observe(decode_s / (num_tokens - 1), now_s)
        if stats is None:
            return
        if stats.transfer_bytes:
            self.transfer.observe(stats.transfer_s, now_s)
            self.transfer_bytes.add(stats.transfer_bytes, now_s)
        if stats.drafted_tokens:
            self.tokens_with_drafts.add(num_tokens, now_s)
            self.accepted_tokens.add(stats.accepted_tokens, now_s)

    def of_worker(self, worker: str) -> tuple[int, int]:
        """Return the prompt tokens that a server prefilled in the window, and how many of them were
        cached."""
        if (sums := self._by_worker.get(worker)) is None:
            return 0, 0
        now_s = self._clock()
        return int(sums[0].total(now_s)), int(sums[1].total(now_s))

    def _count_worker(self, worker: str, prompt_tokens: int, cached_tokens: int, now_s: float) -> None:
        if (sums := self._by_worker.get(worker)) is None:
            if len(self._by_worker) >= MAX_WORKERS:
                del self._by_worker[next(iter(self._by_worker))]
            sums = self._by_worker[worker] = (WindowSum(), WindowSum())
        sums[0].add(prompt_tokens, now_s)
        sums[1].add(cached_tokens, now_s)
