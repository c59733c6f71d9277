"""What the router has seen in the last minute, for people who watch the router. Prometheus does not need
this: it computes its own windows."""

from __future__ import annotations

import time
from collections.abc import Callable

from router.observe.window import WINDOW_S, WindowHistogram, WindowSum
from wire.messages.generation import RequestStats


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
    ) -> None:
        """Count a choice that has finished. ``decode_s`` is the time from its first token to its last."""
        now_s = self._clock()
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

    def accepted_length(self, now_s: float) -> float | None:
        """Return how many tokens a request gets from a step with drafts, on average. The one token of each
        step that is not a draft is counted, too."""
        tokens = self.tokens_with_drafts.total(now_s)
        steps = tokens - self.accepted_tokens.total(now_s)
        return tokens / steps if steps > 0 else None
