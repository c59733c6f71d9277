"""When a failing server gets no more requests, and when it is tried again. In simulated time."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.fleet.links.circuit_breaker import (
    FIRST_BACKOFF_S,
    JITTER,
    MAX_BACKOFF_S,
    MAX_FAILURES,
    CircuitBreaker,
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def breaker_and_clock(seed: int = 0) -> tuple[CircuitBreaker, Clock]:
    clock = Clock()
    return CircuitBreaker(clock, rng=random.Random(seed)), clock


def fail(breaker: CircuitBreaker, times: int = MAX_FAILURES) -> None:
    for _ in range(times):
        breaker.begin().failed()


def serve(breaker: CircuitBreaker) -> None:
    trial = breaker.begin()
    trial.progressed()
    trial.ended()


def test_it_opens_after_failures_in_a_row():
    breaker, _ = breaker_and_clock()
    fail(breaker, MAX_FAILURES - 1)
    assert breaker.state == "closed"
    serve(breaker)
    fail(breaker, MAX_FAILURES - 1)
    assert breaker.allows(), "a success in between starts the count again"
    fail(breaker, 1)
    assert breaker.state == "open"
    assert not breaker.allows()
    assert breaker.num_opened == 1


def test_a_server_that_sends_some_tokens_and_breaks_off_each_time_does_not_pass_for_a_good_one():
    breaker, _ = breaker_and_clock()
    for _ in range(MAX_FAILURES):
        trial = breaker.begin()
        trial.progressed()
        trial.failed()
    assert breaker.state == "open"


def test_requests_that_were_called_back_say_nothing():
    breaker, _ = breaker_and_clock()
    fail(breaker, MAX_FAILURES - 1)
    breaker.begin().ended()
    fail(breaker, 1)
    assert breaker.state == "open"


def test_after_the_backoff_one_probe_goes_through_and_its_first_token_closes():
    breaker, clock = breaker_and_clock()
    fail(breaker)
    clock.now = breaker.retry_at
    assert breaker.state == "half_open"
    assert breaker.allows()
    probe = breaker.begin()
    assert not breaker.allows(), "one at a time"
    probe.progressed()
    assert breaker.state == "closed"
    fail(breaker, MAX_FAILURES - 1)
    assert breaker.allows()
    probe.failed()
    assert breaker.state == "open", "the rest of its answer counts as any other"


def test_a_probe_that_was_called_back_leaves_its_place_to_another():
    breaker, clock = breaker_and_clock()
    fail(breaker)
    clock.now = breaker.retry_at
    breaker.begin().ended()
    assert breaker.allows()


def test_outcomes_of_requests_from_before_it_opened_change_nothing():
    breaker, clock = breaker_and_clock()
    good, bad = breaker.begin(), breaker.begin()
    fail(breaker)
    retry_at = breaker.retry_at
    bad.failed()
    good.progressed()
    good.ended()
    assert (breaker.state, breaker.retry_at) == ("open", retry_at)
    clock.now = retry_at
    serve(breaker)
    assert breaker.state == "closed"


def test_a_request_that_had_to_be_sent_to_an_open_one_is_a_probe():
    breaker, _ = breaker_and_clock()
    fail(breaker)
    serve(breaker)
    assert breaker.state == "closed"


def test_each_failed_probe_doubles_the_backoff_up_to_a_limit_and_a_success_starts_anew():
    breaker, clock = breaker_and_clock()
    fail(breaker)
    backoffs = []
    for _ in range(10):
        backoffs.append(breaker.retry_at - clock.now)
        clock.now = breaker.retry_at
        breaker.begin().failed()
    for i, backoff_s in enumerate(backoffs):
        mean = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**i)
        assert mean * (1 - JITTER) <= backoff_s <= mean * (1 + JITTER)
    clock.now = breaker.retry_at
    serve(breaker)
    fail(breaker)
    assert breaker.retry_at - clock.now <= FIRST_BACKOFF_S * (1 + JITTER)


@given(st.integers(0, 1000))
def test_routers_do_not_probe_at_one_moment(seed):
    (one, _), (other, _) = breaker_and_clock(seed), breaker_and_clock(seed + 1)
    fail(one)
    fail(other)
    assert one.retry_at != other.retry_at


def test_another_process_at_the_address_starts_with_a_clean_sheet():
    breaker, _ = breaker_and_clock()
    before = breaker.begin()
    fail(breaker)
    breaker.reset()
    assert breaker.allows()
    fail(breaker, MAX_FAILURES - 1)
    before.failed()
    assert breaker.allows(), "that was the process before"


def test_one_that_is_held_open_lets_no_probe_through_meanwhile_and_one_after():
    breaker, clock = breaker_and_clock()
    under_way = breaker.begin()
    for clock.now in (0.0, 4.0, 8.0):
        breaker.hold_open(10.0)
        assert not breaker.allows()
    assert (breaker.retry_at, breaker.num_opened) == (18.0, 1)
    under_way.progressed()
    under_way.ended()
    assert not breaker.allows(), "it was sent before"
    clock.now = 18.0
    serve(breaker)
    assert breaker.state == "closed"


class AnyLife(RuleBasedStateMachine):
    """Any events in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker, self.clock = breaker_and_clock()
        self.trials: list = []

    @precondition(lambda self: self.breaker.allows())
    @rule()
    def begin(self):
        was_closed = self.breaker.state == "closed"
        self.trials.append(self.breaker.begin())
        assert was_closed or not self.breaker.allows()

    @precondition(lambda self: self.trials)
    @rule(data=st.data(), outcome=st.sampled_from(["progressed", "ended", "failed"]))
    def tell(self, data, outcome):
        getattr(data.draw(st.sampled_from(self.trials)), outcome)()

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule()
    def hold_open(self):
        self.breaker.hold_open(10.0)
        assert self.breaker.state == "open"

    @rule()
    def all_end(self):
        """Once nothing is under way, it is open, or it takes requests: nothing is stuck for ever."""
        for trial in self.trials:
            trial.ended()
        assert self.breaker.allows() == (self.breaker.state != "open")

    @invariant()
    def an_open_one_allows_nothing_until_its_backoff_is_over(self):
        if self.breaker.state == "open":
            assert not self.breaker.allows()
            assert self.clock.now < self.breaker.retry_at <= self.clock.now + MAX_BACKOFF_S * (1 + JITTER)


TestAnyLife = AnyLife.TestCase
