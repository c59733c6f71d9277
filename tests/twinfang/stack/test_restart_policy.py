"""Pauses before restarts, and when they end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twinfang.stack.restart_policy import RestartLimits, RestartPolicy

LIMITS = RestartLimits(max_restarts=5, window_s=60.0, first_delay_s=0.5, max_delay_s=4.0)


def test_pauses_double_up_to_their_limit_and_then_it_gives_up():
    policy = RestartPolicy(LIMITS)
    assert [policy.delay_s(float(i)) for i in range(6)] == [0.5, 1.0, 2.0, 4.0, 4.0, None]


def test_a_death_long_ago_is_forgotten():
    policy = RestartPolicy(LIMITS)
    for i in range(5):
        policy.delay_s(float(i))
    assert policy.delay_s(1_000.0) == 0.5


@given(st.lists(st.floats(min_value=0.0, max_value=100.0), max_size=60))
def test_it_gives_up_exactly_if_there_were_more_deaths_in_the_window_than_restarts_allowed(gaps_s):
    policy, now_s, deaths = RestartPolicy(LIMITS), 0.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        deaths.append(now_s)
        recent = [death for death in deaths if death > now_s - LIMITS.window_s]
        assert (policy.delay_s(now_s) is None) == (len(recent) > LIMITS.max_restarts)
