"""Keeps requests away from a server that keeps failing, until a request shows that it serves again.

    closed ──MAX_FAILURES in a row──▶ open ──backoff is over──▶ half-open ──probe succeeds──▶ closed
                                       ▲                            │
                                       └─probe fails, longer backoff┘

The breaker is a pure state machine: callers tell it the outcomes of requests, and it reads an injected clock.
A probe is an ordinary request. A breaker can also be held open. This is needed while a server's engine hangs:
its requests do not end, so they have no outcome that would open the breaker.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

BreakerState = Literal["closed", "half_open", "open"]

MAX_FAILURES = 5
"""Failures in a row that open the breaker. It is more than the number of attempts of one request, so that a
single request that can't be served does not take the server away from all other requests."""
FIRST_BACKOFF_S = 1.0
"""The first backoff. It is doubled for each probe that fails."""
MAX_BACKOFF_S = 30.0
JITTER = 0.25
"""The backoff becomes longer or shorter at random, by up to this share of it, so that several routers do not
all probe at the same moment."""


class CircuitBreaker:
    """The circuit breaker of one server. Each request begins a :class:`Trial`, which is told the outcome."""

    def __init__(self, clock: Callable[[], float], *, rng: random.Random | None = None) -> None:
        self._clock = clock
        self._rng = rng or random.Random()
        self._failures = 0
        self._openings = 0
        """Number of openings in a row, without a success in between."""
        self._is_closed = True
        self._probe: Trial | None = None
        self.retry_at = 0.0
        """When an open breaker lets a probe through, in seconds of the clock."""
        self.num_opened = 0
        """Number of openings since the start."""
        self.era = 0
        """The number of changes of state. The outcome of a request that began before the last change does not
        count."""

    @property
    def state(self) -> BreakerState:
        if self._is_closed:
            return "closed"
        return "half_open" if self._clock() >= self.retry_at else "open"

    def allows(self) -> bool:
        """Return whether a request should be sent now. A half-open breaker allows one request at a time."""
        return self._is_closed or (self._probe is None and self.state == "half_open")

    def begin(self) -> Trial:
        """Begin the trial of a request. If the breaker is open and the request is sent because there is no
        other server, the request is a probe as well."""
        trial = Trial(self)
        if not self._is_closed and self._probe is None:
            self._probe = trial
        return trial

    def hold_open(self, for_s: float) -> None:
        """Allow no probe for ``for_s`` seconds. Called when something other than a request has shown that the
        server does not serve."""
        if self._is_closed:
            self._open()
        self.retry_at = max(self.retry_at, self._clock() + for_s)

    def reset(self) -> None:
        """Forget all failures, because another process answers at this address now."""
        self._close()

    # --- called by trials -------------------------------------------------------------------------

    def _succeeded(self, trial: Trial) -> None:
        if trial is self._probe:
            self._close()
            trial.era = self.era  # its later outcome counts, too
        elif trial.era == self.era and self._is_closed and trial.has_ended:
            self._failures = 0

    def _failed(self, trial: Trial) -> None:
        if trial is self._probe:
            self._open()
        elif trial.era == self.era and self._is_closed:
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                self._open()

    def _dropped(self, trial: Trial) -> None:
        if trial is self._probe:
            self._probe = None

    def _open(self) -> None:
        backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0**self._openings)
        self.retry_at = self._clock() + backoff_s * self._rng.uniform(1 - JITTER, 1 + JITTER)
        self._openings = min(self._openings + 1, 32)
        self.num_opened += 1
        self._is_closed, self._probe = False, None
        self.era += 1

    def _close(self) -> None:
        self._failures = self._openings = 0
        self._is_closed, self._probe = True, None
        self.era += 1


class Trial:
    """One request at one server. It may progress, and then it ends or fails; further calls do nothing."""

    def __init__(self, breaker: CircuitBreaker) -> None:
        self.era = breaker.era
        self.has_ended = False
        self._breaker = breaker
        self._has_progressed = False

    def progressed(self) -> None:
        """Note that the server has begun to serve the request. With that, a probe has succeeded; its request
        may run on for minutes."""
        if not self.has_ended and not self._has_progressed:
            self._has_progressed = True
            self._breaker._succeeded(self)

    def ended(self) -> None:
        """End a request that did not fail through the server's fault. If the request has progressed, the
        server has served it. Otherwise it was cancelled and says nothing about the server."""
        if self.has_ended:
            return
        self.has_ended = True
        if self._has_progressed:
            self._breaker._succeeded(self)
        else:
            self._breaker._dropped(self)

    def failed(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self._breaker._failed(self)
