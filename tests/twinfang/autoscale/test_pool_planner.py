"""Sizes follow needs: within limits, not to and fro, not before the last change is seen to work."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from twinfang.autoscale.pool_planner import (
    Needs,
    PlannerPace,
    PoolHistory,
    PoolLimits,
    PoolSize,
    decide,
)

PACE = PlannerPace(up_pause_s=60.0, down_after_s=300.0)
LIMITS = PoolLimits(1, 20)
LOOK_S = 15.0


def sizes(needs, *, start=1, limits=LIMITS, starts_in=0, pace=PACE):
    """Pool sizes over looks, where new servers serve ``starts_in`` looks after they were asked for."""
    size, history, asked, found = start, PoolHistory(), [], []
    for i, need in enumerate(needs):
        asked = [(look, num) for look, num in asked if look + starts_in > i]
        serving = min([size, *(num for _, num in asked)])
        decision, history = decide(i * LOOK_S, PoolSize(size, serving), need, limits, pace, history)
        if decision.num_servers > size:
            asked.append((i, size))
        size = decision.num_servers
        found.append(size)
    return found


def need(now, slack=None):
    return Needs(now, slack or now, "why")


NEEDS = st.builds(lambda now, more: need(now, now + more), st.integers(1, 30), st.integers(0, 5))


@given(st.lists(st.none() | NEEDS, max_size=80), st.integers(0, 30), st.integers(1, 5), st.integers(5, 20))
def test_sizes_stay_within_limits(needs, start, low, high):
    assert all(low <= size <= high for size in sizes(needs, start=start, limits=PoolLimits(low, high)))


@given(NEEDS, st.integers(1, 20), st.integers(0, 8))
def test_a_load_that_does_not_change_moves_a_pool_one_way_and_to_where_it_is_enough(one, start, starts_in):
    found = sizes([one] * 200, start=start, starts_in=starts_in)
    steps = [later - earlier for earlier, later in pairwise([start, *found])]
    assert not (min(steps) < 0 < max(steps)), "to and fro"
    assert LIMITS.within(one.now) <= found[-1]
    assert found[-1] <= max(start, LIMITS.within(one.now))
    assert found[-1] <= max(LIMITS.within(one.slack), LIMITS.within(one.now))


@given(st.lists(NEEDS, min_size=40, max_size=80), st.integers(5, 20))
def test_a_pool_of_which_a_part_can_not_be_read_grows_but_never_shrinks(needs, start):
    partial = [replace(one, unread="10.0.0.7:18200") for one in needs]
    found = sizes(partial, start=start)
    assert found == sorted(found)
    assert found[0] >= start
    assert found[-1] >= min(20, max(one.now for one in needs[-1:]))


def test_what_was_needed_while_a_part_could_not_be_read_is_no_reason_to_shrink():
    whole, partial = need(6), replace(need(2), unread="10.0.0.7:18200")
    assert sizes([whole] * 30 + [partial] * 60 + [whole] * 10, start=6) == [6] * 100


@given(st.lists(NEEDS, min_size=2, max_size=60), st.integers(0, 4))
def test_changes_keep_their_distance(needs, starts_in):
    found = sizes(needs, start=5, starts_in=starts_in)
    steps = [(i, later - earlier) for i, (earlier, later) in enumerate(pairwise([5, *found]))]
    changes = [(i * LOOK_S, step) for i, step in steps if step]
    for (earlier_s, _), (later_s, step) in pairwise(changes):
        assert later_s - earlier_s >= (PACE.up_pause_s if step > 0 else PACE.down_after_s)


@given(st.lists(NEEDS, min_size=1, max_size=60))
def test_a_pool_shrinks_to_no_less_than_was_needed_in_the_last_while(needs):
    found = sizes(needs, start=20)
    looks = int(PACE.down_after_s / LOOK_S)
    for i, (earlier, later) in enumerate(pairwise([20, *found])):
        if later < earlier:
            assert later >= max(LIMITS.within(one.slack) for one in needs[max(0, i - looks + 1) : i + 1])


def test_nothing_is_asked_for_while_what_was_asked_for_does_not_serve():
    assert sizes([need(4)] * 30, start=1, starts_in=10)[:9] == [2] * 9
    decision, _ = decide(0.0, PoolSize(2, 1), need(3), LIMITS, PACE, PoolHistory())
    assert (decision.kind, "1 do not serve yet" in decision.why) == ("waits", True)


def test_a_pool_grows_to_double_at_most():
    assert sizes([need(20)] * 20)[0:20:4] == [2, 4, 8, 16, 20]


def test_without_figures_nothing_changes_but_what_limits_say():
    assert sizes([None] * 50, start=3) == [3] * 50
    assert sizes([None], start=0) == [1]
    assert sizes([None], start=30) == [20]
