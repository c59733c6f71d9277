"""Each index has at most one owner at a time, and the null entry never has one."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from benchmarks.handoff.ranges import TRAFFIC, measure
from engine.memory.index_pool import NULL_INDEX, IndexPool


class PoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = IndexPool(17, "block")
        self.owned: list[list[int]] = []

    @rule(count=st.integers(0, 6), data=st.data())
    def allocate(self, count, data):
        behind = data.draw(st.sampled_from([NULL_INDEX, *(index for one in self.owned for index in one)]))
        if count <= self.pool.num_free:
            free = [*self.pool.free_map, 0]
            taken = self.pool.allocate(count, behind)
            follows = behind != NULL_INDEX and free[behind + 1]
            assert not (count and follows) or taken[0] == behind + 1
            if not follows and any(all(free[i : i + 2 * count]) for i in range(len(free) - 2 * count)):
                assert taken == list(range(taken[0], taken[0] + count)) if count else not taken
            self.owned.append(taken)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data):
        self.pool.free(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

    @invariant()
    def neighbours_are_one_run(self):
        runs = self.pool._free
        assert not runs._end_of.keys() & runs._start_of.keys()
        assert {end: start for start, end in runs._end_of.items()} == runs._start_of
        assert all(self.pool.free_map[i] for start, end in runs._end_of.items() for i in range(start, end))

    @invariant()
    def every_index_is_free_or_owned_once(self):
        owned = [index for indices in self.owned for index in indices]
        assert len(set(owned)) == len(owned)
        assert NULL_INDEX not in owned
        assert len(owned) + self.pool.num_free == self.pool.capacity == 16


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=50, stateful_step_count=30)


def test_a_fresh_pool_hands_out_adjacent_ascending_indices():
    assert IndexPool(10, "block").allocate(4) == [1, 2, 3, 4]


def test_freeing_twice_or_freeing_the_null_entry_raises():
    pool = IndexPool(4, "slot")
    (index,) = pool.allocate(1)
    pool.free([index])
    with pytest.raises(RuntimeError, match=f"slot {index} is freed, but nobody owns it"):
        pool.free([index])
    with pytest.raises(RuntimeError, match="slot 0"):
        pool.free([NULL_INDEX])


def test_asking_for_more_than_is_free_raises_and_takes_nothing():
    pool = IndexPool(4, "block")
    with pytest.raises(RuntimeError, match="asked for 4 blocks; only 3 are free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_all_that_is_free_comes_in_ascending_order_however_it_became_free():
    pool = IndexPool(11, "block")
    owned = pool.allocate(10)
    for index in (7, 2, 3, 9, 5):
        pool.free([index])
    assert pool.allocate(5) == [2, 3, 5, 7, 9]
    assert pool.num_free == 0
    pool.free(owned)
    assert pool.allocate(10) == owned


def test_single_indices_fill_gaps_and_long_runs_stay_whole():
    pool = IndexPool(101, "block")
    owned = pool.allocate(40)
    pool.free([owned[5]])
    pool.free([owned[20], owned[21]])
    assert pool.allocate(1) == [owned[5]]
    assert pool.allocate(2) == [owned[20], owned[21]]
    assert pool.allocate(60) == list(range(41, 101))


def test_what_follows_an_index_comes_first():
    pool = IndexPool(101, "block")
    (first, other) = (pool.allocate(10), pool.allocate(10))
    pool.free(other[:2])
    assert pool.allocate(4, behind=first[-1]) == [11, 12, 21, 22]
    assert pool.allocate(1, behind=first[-1]) == [23]


def test_handoffs_of_a_busy_pool_have_few_ranges():
    figures = measure(TRAFFIC[0], num_requests=300)
    assert figures.mean < figures.blocks / 5
