"""Leases end once and expire on time, and no two leases ever have the same cell and epoch."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.leases.lease_table import LeaseTable

TTL_S = 10.0
NUM_CELLS = 4


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make_table(num_cells=NUM_CELLS):
    clock, epochs = Clock(), [0] * num_cells
    return LeaseTable(epochs, ttl_s=TTL_S, clock=clock), epochs, clock


def test_a_lease_s_cell_holds_its_epoch_until_it_ends():
    table, epochs, _ = make_table()
    lease = table.grant("a")
    assert epochs[lease.lease_id] == lease.epoch
    assert table.end(lease.lease_id, lease.epoch) == lease
    assert epochs[lease.lease_id] > lease.epoch
    assert len(table) == 0


def test_a_second_end_is_nothing():
    table, epochs, _ = make_table()
    lease = table.grant("a")
    table.end(lease.lease_id, lease.epoch)
    before = list(epochs)
    assert table.end(lease.lease_id, lease.epoch) is None
    assert epochs == before


def test_a_late_message_does_not_end_the_cell_s_next_lease():
    table, _, _ = make_table(num_cells=1)
    first = table.grant("a")
    table.end(first.lease_id, first.epoch)
    second = table.grant("b")
    assert second.lease_id == first.lease_id
    assert table.end(first.lease_id, first.epoch) is None
    assert len(table) == 1


def test_a_renewed_lease_lives_as_long_again_and_outlives_younger_ones():
    table, _, clock = make_table()
    first, second = table.grant("a"), table.grant("b")
    clock.now += TTL_S - 1
    assert table.renew(first.lease_id, first.epoch)
    clock.now += 1
    assert [lease.request_id for lease in table.end_expired()] == ["b"]
    assert not table.renew(second.lease_id, second.epoch)
    clock.now += TTL_S - 1
    assert [lease.request_id for lease in table.end_expired()] == ["a"]


def test_a_late_renewal_does_not_lengthen_the_cell_s_next_lease():
    table, _, clock = make_table(num_cells=1)
    first = table.grant("a")
    table.end(first.lease_id, first.epoch)
    table.grant("b")
    clock.now += TTL_S / 2
    assert not table.renew(first.lease_id, first.epoch)
    clock.now += TTL_S / 2
    assert [lease.request_id for lease in table.end_expired()] == ["b"]


@pytest.mark.parametrize("lease_id", [-1, 1, NUM_CELLS, 1 << 40])
def test_a_cell_that_is_not_leased_can_t_be_ended(lease_id):
    table, epochs, _ = make_table()
    table.grant("a")
    assert table.end(lease_id, 0) is None
    assert epochs == [0] * NUM_CELLS


def test_a_lease_expires_when_its_time_to_live_is_over_and_not_before():
    table, _, clock = make_table()
    first = table.grant("a")
    clock.now += 4
    second = table.grant("b")
    clock.now += 5.999
    assert table.end_expired() == []
    clock.now += 0.001
    assert table.end_expired() == [first]
    clock.now += 4
    assert table.end_expired() == [second]


def test_more_leases_than_cells_is_a_fault():
    table, _, _ = make_table(num_cells=1)
    table.grant("a")
    with pytest.raises(RuntimeError, match="all 1 leases"):
        table.grant("b")


class Leases(RuleBasedStateMachine):
    """Against a model: a dict of live leases and the set of all (cell, epoch) ever granted."""

    def __init__(self):
        super().__init__()
        self.table, self.epochs, self.clock = make_table()
        self.live = {}
        self.ended = []
        self.granted = set()
        self.seen_epochs = list(self.epochs)

    @precondition(lambda self: len(self.live) < NUM_CELLS)
    @rule()
    def grant(self):
        lease = self.table.grant(f"r{len(self.granted)}")
        key = (lease.lease_id, lease.epoch)
        assert key not in self.granted
        assert lease.lease_id not in self.live
        self.granted.add(key)
        self.live[lease.lease_id] = lease

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data):
        lease = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        assert self.table.end(lease.lease_id, lease.epoch) == lease
        self.ended.append(lease)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def end_again(self, data):
        lease = data.draw(st.sampled_from(self.ended))
        assert self.table.end(lease.lease_id, lease.epoch) is None

    @rule(seconds=st.floats(0, TTL_S))
    def wait(self, seconds):
        self.clock.now += seconds
        due = {i: lease for i, lease in self.live.items() if lease.expires_at <= self.clock.now}
        assert {lease.lease_id: lease for lease in self.table.end_expired()} == due
        for lease_id in due:
            self.ended.append(self.live.pop(lease_id))

    @invariant()
    def the_table_counts_what_is_live(self):
        assert len(self.table) == len(self.live)

    @invariant()
    def the_cell_of_a_live_lease_has_not_moved(self):
        for lease in self.live.values():
            assert self.epochs[lease.lease_id] == lease.epoch

    @invariant()
    def the_cell_of_an_ended_lease_has(self):
        for lease in self.ended:
            assert self.epochs[lease.lease_id] > lease.epoch

    @invariant()
    def epochs_only_grow(self):
        assert all(now >= before for now, before in zip(self.epochs, self.seen_epochs, strict=True))
        self.seen_epochs = list(self.epochs)


TestLeases = Leases.TestCase
