"""What has to hold after every event in the life of a server (:mod:`testing.lives.random_lives`)."""

from hypothesis.stateful import RuleBasedStateMachine, invariant

BLOCK = 4


def assert_owns_nothing(request):
    """Not a block, a slot or a row, and no anchor that could name one of its former life."""
    assert request.row == -1
    assert (request.memory.block_ids, request.memory.nodes, request.memory.slots) == ([], [], [])
    assert (request.memory.state_index, request.memory.read_slot, request.memory.read_state) == (0, 0, None)
    assert request.memory.boundary is None


class OwnedOnce(RuleBasedStateMachine):
    """Memory has one owner, what is cached is what it claims to be, and what is offered is complete.

    The machine has a ``scheduler`` and a modelled ``device``.
    """

    num_positions = 1
    has_state = has_kv = True
    has_tier = False

    def check_all(self):
        for one in self.invariants:
            one.function(self)

    def everyone(self):
        s = self.scheduler
        places = [s.waiting, s.forks.waiting, s.transferring, s.running, s.preempted, s.held, s.quarantined]
        return [one for place in places for one in place.values()]

    def slots_of(self, one):
        """What is its own: a cached state that it reads is not."""
        own_read_slot = (
            [one.memory.read_slot] if one.memory.read_slot and one.memory.read_state is None else []
        )
        return one.memory.slots + own_read_slot + ([one.memory.boundary.slot] if one.memory.boundary else [])

    @invariant()
    def all_memory_has_one_owner(self):
        s, owned, cache = self.scheduler, self.scheduler.owned, self.scheduler.owned.cache
        everyone = self.everyone()
        assert len({one.request_id for one in everyone}) == len(everyone)
        assert set(self.device.host) == set(s.preempted)
        nodes = list(cache._nodes.values())
        private = [
            block_id
            for one in everyone
            for i, block_id in enumerate(one.memory.block_ids)
            if i >= len(one.memory.nodes) or one.memory.nodes[i].block_id != block_id
        ]
        blocks = private + cache.blocks_of(nodes)
        assert len(set(blocks)) == len(blocks) == owned.blocks.capacity - owned.blocks.num_free
        slots = [slot for one in everyone for slot in self.slots_of(one)]
        slots += [state.slot for state in cache._states]
        slots += [
            boundary.slot
            for flight in self.device.flights
            for row in flight.plan.prefill_rows
            for boundary in row.boundaries
        ]
        assert len(set(slots)) == len(slots) == owned.slots.capacity - owned.slots.num_free
        rows = [one.row for one in everyone if one.row >= 0]
        assert len(set(rows)) == len(rows) == self.max_num_seqs - len(owned.free_rows)
        assert 0 not in blocks
        assert 0 not in slots

    @invariant()
    def anchors_are_kept_only_where_a_step_may_follow(self):
        s = self.scheduler
        for one in [*s.waiting.values(), *s.forks.waiting.values(), *s.preempted.values()]:
            assert_owns_nothing(one)
            assert one.num_in_flight == 0
        for one in s.held.values():
            assert one.row == -1
            assert one.memory.boundary is None
            assert len(one.memory.slots) == (self.has_state and one.memory.read_state is None)
        for one in [*s.transferring.values(), *s.quarantined.values()]:
            assert (one.memory.state_index, one.memory.read_slot, one.memory.boundary) == (0, 0, None)
        for one in s.running.values():
            assert len(one.memory.slots) == (self.num_positions if self.has_state else 0)
            assert len(one.memory.block_ids) > 0 or not self.has_kv
            assert 0 <= one.memory.state_index < self.num_positions
            assert one.num_in_flight <= len(self.device.flights)
            assert one.num_planned >= one.num_computed + one.num_in_flight

    @invariant()
    def reference_counts_are_what_requests_hold(self):
        cache, everyone = self.scheduler.owned.cache, self.everyone()
        held = [id(node) for one in everyone for node in one.memory.nodes]
        for node in cache._nodes.values():
            assert node.num_users == held.count(id(node))
            assert node.num_children == sum(n.parent is node for n in cache._nodes.values())
            assert node.parent is None or cache._nodes.get(node.parent.key) is node.parent
        for state in cache._states:
            assert state.num_users == sum(one.memory.read_state is state for one in everyone)
            assert state.node.state is state
        num_idle = sum(n.num_users == 0 for n in cache._nodes.values())
        assert cache.num_cached_blocks == (num_idle if self.has_kv else 0)
        assert cache.num_cached_states == sum(state.num_users == 0 for state in cache._states)

    @invariant()
    def nodes_without_memory_lead_to_a_state_or_are_in_use(self):
        nodes = self.scheduler.owned.cache._nodes.values()
        if not self.has_kv:
            assert all(one.num_users or one.num_children or one.state is not None for one in nodes)

    @invariant()
    def what_can_serve_a_prefix_is_in_the_journal(self):
        cache = self.scheduler.owned.cache
        serving = {n.key for n in cache._nodes.values() if n.state is not None or not self.has_state}
        news = cache.journal.news(None)
        assert set(news.added) == serving
        in_host = {b.key for b in cache.tier._blocks.values() if b.is_start or not self.has_state}
        slower = [set(tier.added) for tier in news.tiers]
        assert slower[:1] == [in_host - serving] * self.has_tier
        for in_files in slower[1:]:
            assert not in_files & (in_host | serving), "a start is told with a slower tier than it has"

    @invariant()
    def what_goes_first_is_idle_and_what_is_retained_is_known(self):
        cache, kept = self.scheduler.owned.cache, self.scheduler.owned.sessions._retained.values()
        assert all(state in cache._states and not state.num_users for state in cache._outdated)
        assert {start for one in kept for start in one.starts} == cache.tier._retained

    @invariant()
    def what_is_cached_is_what_it_claims_to_be(self):
        self.device.check_cache()

    @invariant()
    def what_host_memory_has_is_what_it_claims_to_be(self):
        self.device.check_host_owners()
        self.device.check_host()

    @invariant()
    def null_entries_are_untouched(self):
        assert self.device.slots[0] is None
        assert self.device.blocks[0] == [None] * BLOCK
