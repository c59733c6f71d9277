"""Each index has at most one owner at a time, and the null entry never has one."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.memory.index_pool import NULL_INDEX, IndexPool


class PoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = IndexPool(17, "block")
        self.owned: list[list[int]] = []

    @rule(count=st.integers(0, 6))
    def allocate(self, count):
        if count <= self.pool.num_free:
            self.owned.append(self.pool.allocate(count))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data):
        self.pool.free(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

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
