"""Pauses between tries grow, have a limit, and start small again after a connection that lasted."""

import random

from hypothesis import given
from hypothesis import strategies as st

from router.kubernetes.reflector import FIRST_PAUSE_S, JITTER, LASTED_S, MAX_PAUSE_S, Backoff


@given(st.lists(st.floats(0, 100), max_size=40), st.integers())
def test_a_pause_is_never_shorter_than_the_first_nor_longer_than_the_last(lasted, seed):
    backoff = Backoff(random.Random(seed))
    for lasted_s in lasted:
        pause_s = backoff.pause_s(lasted_s)
        assert FIRST_PAUSE_S * (1 - JITTER) <= pause_s <= MAX_PAUSE_S * (1 + JITTER)
        if lasted_s >= LASTED_S:
            assert pause_s <= FIRST_PAUSE_S * (1 + JITTER)


@given(st.integers())
def test_in_ten_seconds_of_failures_there_are_few_attempts(seed):
    backoff, now_s, num_attempts = Backoff(random.Random(seed)), 0.0, 0
    while now_s < 10:
        num_attempts += 1
        now_s += backoff.pause_s(0.0)
    assert num_attempts <= 10
