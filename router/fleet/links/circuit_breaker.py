"""Keeps requests from a server that keeps failing them, until one of them shows that it serves again.

    closed ──MAX_FAILURES in a row──▶ open ──backoff is over──▶ half-open ──probe succeeds──▶ closed
                                       ▲                            │
                                       └────probe fails, longer─────┘

A pure state machine: it is told outcomes and reads an injected clock. The probe is a request like any other.
It may be held open, too: while a server's engine hangs, requests that have no end would tell nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

BreakerState = Literal["closed", "half_open", "open"]

MAX_FAILURES = 5
"""In a row. More than one request's attempts: what a single request can't get should not close a server."""
FIRST_BACKOFF_S = 1.0
"""Doubled for each probe that fails."""
MAX_BACKOFF_S = 30.0
JITTER = 0.25
"""Of the backoff, either way, so that several routers do not all probe at one moment."""


class CircuitBreaker:
    """Of one server. Each request begins a :class:`Trial` there and tells it how it went."""

    def __init__(self, clock: Callable[[], float], *, rng: random.Random | None = None) -> None:
        self._clock = clock
        self._rng = rng or random.Random()
        self._failures = 0
        self._openings = 0
        """In a row, without a success in between."""
        self._is_closed = True
        self._probe: Trial | None = None
        self.retry_at = 0.0
        """When an open breaker lets a probe through, in seconds of the clock."""
        self.num_opened = 0
        """Since the start."""
        self.era = 0
        """Counts changes of state: the outcome of a request that began before the last one says nothing."""

    @property
    def state(self) -> BreakerState:
        if self._is_closed:
            return "closed"
        return "half_open" if self._clock() >= self.retry_at else "open"

    def allows(self) -> bool:
        """Whether a request should be sent now. Half-open, that is one at a time."""
        return self._is_closed or (self._probe is None and self.state == "half_open")

    def begin(self) -> Trial:
        """A request is sent. One sent to an open breaker, for want of another server, is a probe as well."""
        trial = Trial(self)
        if not self._is_closed and self._probe is None:
            self._probe = trial
        return trial

    def hold_open(self, for_s: float) -> None:
        """It is known by other means than requests that the server does not serve: no probe for so long."""
        if self._is_closed:
            self._open()
        self.retry_at = max(self.retry_at, self._clock() + for_s)

    def reset(self) -> None:
        """Another process answers at this address: it starts with a clean sheet."""
        self._close()

    # --- told by trials --------------------------------------------------------------------------

    def _succeeded(self, trial: Trial) -> None:
        if trial is self._probe:
            self._close()
            trial.era = self.era  # what becomes of it from now on counts
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
    """One request at one server. Its end is told once; what is said after that does not count."""

    def __init__(self, breaker: CircuitBreaker) -> None:
        self.era = breaker.era
        self.has_ended = False
        self._breaker = breaker
        self._has_progressed = False

    def progressed(self) -> None:
        """The server does serve it: enough for a probe, whose request may go on for minutes."""
        if not self.has_ended and not self._has_progressed:
            self._has_progressed = True
            self._breaker._succeeded(self)

    def ended(self) -> None:
        """It is over, and not by a fault of the server: served if it progressed, else called back."""
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
