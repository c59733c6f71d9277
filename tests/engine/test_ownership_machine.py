"""Random lives of requests over pools, prefix cache and scheduler: all memory has exactly one owner.

The machine also plays the device: it writes into each slot which prefix its state belongs to, and into each
block which tokens it holds, and checks before every row that what is read is what should be there. So an
index that is stale, freed early or handed out twice shows as wrong content, not only as a wrong count.
"""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.cache_modes import make_cache_mode
from engine.capacity import CapacityPlan
from engine.request import Request
from engine.scheduler import Scheduler
from wire.handoff import Ticket
from wire.sampling_params import SamplingParams

BLOCK = 4
STATE_BLOCK = 8
MAX_MODEL_LEN = 64


class LivesOfRequests(RuleBasedStateMachine):
    """Admit, chunk, decode, finish, cancel, preempt, evict, hand over, quarantine."""

    mode = "none"

    @initialize(
        num_slots=st.integers(3, 9),
        num_blocks=st.integers(18, 30),
        budget=st.integers(5, 24),
        max_num_seqs=st.integers(2, 5),
    )
    def start(self, num_slots, num_blocks, budget, max_num_seqs):
        plan = CapacityPlan(num_blocks, num_slots, BLOCK, 1, 1, MAX_MODEL_LEN)
        self.max_num_seqs = max_num_seqs
        self.scheduler = Scheduler(
            plan,
            make_cache_mode(self.mode, BLOCK, STATE_BLOCK),
            max_num_seqs=max_num_seqs,
            max_batch_tokens=budget,
        )
        self.slots = [None] * num_slots
        self.blocks = [[None] * BLOCK for _ in range(num_blocks)]
        self.host = {}
        self.transfers = []
        self.count = 0
        self.steps_since_news = 0

    # --- the device ------------------------------------------------------------------------------

    def write(self, request, start, end):
        """KV of tokens start … end - 1, tagged with token and position."""
        for position in range(start, end):
            block_id = request.block_ids[position // BLOCK]
            self.blocks[block_id][position % BLOCK] = (position, request.tokens[position])

    def check(self, request, length):
        """KV and state of the first ``length`` tokens are where the request will read them."""
        for position in range(length):
            found = self.blocks[request.block_ids[position // BLOCK]][position % BLOCK]
            assert found == (position, request.tokens[position]), (request.request_id, position)
        if length:
            assert self.slots[request.state_slot] == tuple(request.tokens[:length]), request.request_id

    # --- rules -----------------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from(["both", "kept", "prefill", "handed over", "resumed"]),
        family=st.integers(0, 2),
        shared=st.integers(0, 40),
        own=st.integers(1, 16),
        max_tokens=st.integers(1, 7),
        salt=st.sampled_from(["", "", "x"]),
    )
    def add(self, kind, family, shared, own, max_tokens, salt):
        self.count += 1
        tokens = [family] * shared + [100 + (self.count * 7 + i) % 5 for i in range(own)]
        name = f"r{self.count}"
        if len(tokens) < 2:
            kind = "both"
        ticket = None
        if kind in ("handed over", "resumed"):
            length = len(tokens) - 1 if kind == "handed over" else max(1, len(tokens) - own - 1)
            ticket = Ticket(name, 0, 0, "h:1", "i", length, (1,) * -(-length // BLOCK), 1, 1.0)
        params = None if kind in ("prefill", "resumed") else SamplingParams(max_tokens=max_tokens)
        request = Request(name, tokens, params, ticket=ticket, cache_salt=salt, keeps_state=kind == "kept")
        self.scheduler.add(request)

    @rule(num=st.integers(1, 4))
    def step(self, num):
        for _ in range(num):
            self.one_step()

    def one_step(self):
        plan = self.scheduler.schedule()
        assert sum(row.num_new for row in plan.rows) <= self.scheduler._max_batch_tokens
        assert all(row.is_decode for row in plan.decode_rows)
        assert not any(row.is_decode for row in plan.prefill_rows)
        for swap in plan.swap_out:
            kept = [list(self.blocks[block_id]) for block_id in swap.block_ids]
            self.host[swap.request_id] = (kept, self.slots[swap.slot])
        for swap in plan.swap_in:
            kept, state = self.host.pop(swap.request_id)
            for block_id, content in zip(swap.block_ids, kept, strict=True):
                self.blocks[block_id] = list(content)
            self.slots[swap.slot] = state
        for request in plan.prefilled:
            self.check(request, request.num_computed)
        self.transfers += plan.to_transfer
        for row in plan.rows:
            self.check(row.request, row.num_before)
        written = [row.request.slot for row in plan.rows]
        written += [boundary.slot for row in plan.rows for boundary in row.boundaries]
        assert len(set(written)) == len(written), "two rows write one slot"
        read = {row.request.state_slot: row.request for row in plan.rows if row.num_before}
        for row in plan.rows:
            assert read.get(row.request.slot, row.request) is row.request, "a row overwrites another's state"
        for row in plan.rows:
            self.compute(row)

    def compute(self, row):
        request = row.request
        end = row.num_before + row.num_new
        self.write(request, row.num_before, end)
        for boundary in row.boundaries:
            assert row.num_before < boundary.length < end
            self.slots[boundary.slot] = tuple(request.tokens[: boundary.length])
        self.slots[request.slot] = tuple(request.tokens[:end])
        samples = row.samples
        self.scheduler.computed(row)
        if samples:
            request.tokens.append(200 + request.num_output)
        if request.prefill_only and request.num_computed == request.target:
            self.scheduler.hold(request)
        elif request.params and request.num_output == request.params.max_tokens:
            if request.keeps_state:
                self.scheduler.hold(request)
            else:
                self.scheduler.finish(request)

    @rule(data=st.data(), how=st.sampled_from(["landed", "landed", "landed", "late", "failed"]))
    def end_transfer(self, data, how):
        if not self.transfers:
            return
        request = self.transfers.pop(data.draw(st.integers(0, len(self.transfers) - 1)))
        if request.request_id not in self.scheduler.transferring:
            return
        length = request.ticket.num_tokens
        if how == "landed":
            self.write(request, len(request.nodes) * BLOCK, length)
            self.slots[request.slot] = tuple(request.tokens[:length])
            self.scheduler.transferred(request, length)
        else:
            self.scheduler.quarantine(request)
            if how == "failed":
                self.scheduler.release(request.request_id)

    @rule(data=st.data())
    def release(self, data):
        kept = [*self.scheduler.held, *self.scheduler.quarantined]
        if kept:
            name = data.draw(st.sampled_from(kept))
            if name in self.scheduler.held:
                self.check(self.scheduler.held[name], self.scheduler.held[name].num_computed)
            self.scheduler.release(name)

    @rule(data=st.data())
    def cancel(self, data):
        s = self.scheduler
        active = [*s.running, *s.waiting, *s.preempted]
        if active:
            name = data.draw(st.sampled_from(active))
            self.host.pop(name, None)
            s.finish(s.find_active(name))

    # --- invariants ------------------------------------------------------------------------------

    @invariant()
    def all_memory_has_one_owner(self):
        s, owned, cache = self.scheduler, self.scheduler.owned, self.scheduler.owned.cache
        places = [s.waiting, s.transferring, s.running, s.preempted, s.held, s.quarantined]
        everyone = [one for place in places for one in place.values()]
        assert len({one.request_id for one in everyone}) == len(everyone)
        assert set(self.host) == set(s.preempted)
        nodes = list(cache._nodes.values())
        private = [
            block_id
            for one in everyone
            for i, block_id in enumerate(one.block_ids)
            if i >= len(one.nodes) or one.nodes[i].block_id != block_id
        ]
        blocks = private + [node.block_id for node in nodes]
        assert len(set(blocks)) == len(blocks) == owned.blocks.capacity - owned.blocks.num_free
        slots = [one.slot for one in everyone if one.slot] + [state.slot for state in cache._states]
        assert len(set(slots)) == len(slots) == owned.slots.capacity - owned.slots.num_free
        rows = [one.row for one in everyone if one.row >= 0]
        assert len(set(rows)) == len(rows) == self.max_num_seqs - owned.num_free_rows
        assert 0 not in blocks
        assert 0 not in slots

    @invariant()
    def reference_counts_are_what_requests_hold(self):
        s, cache = self.scheduler, self.scheduler.owned.cache
        places = [s.waiting, s.transferring, s.running, s.preempted, s.held, s.quarantined]
        everyone = [one for place in places for one in place.values()]
        held = [id(node) for one in everyone for node in one.nodes]
        for node in cache._nodes.values():
            assert node.num_users == held.count(id(node))
            assert node.num_children == sum(n.parent is node for n in cache._nodes.values())
            assert node.parent is None or cache._nodes.get(node.parent.key) is node.parent
        for state in cache._states:
            assert state.num_users == sum(one.read_state is state for one in everyone)
            assert state.node.state is state
        assert cache.num_cached_blocks == sum(n.num_users == 0 for n in cache._nodes.values())
        assert cache.num_cached_states == sum(state.num_users == 0 for state in cache._states)

    @invariant()
    def null_entries_are_untouched(self):
        assert self.slots[0] is None
        assert self.blocks[0] == [None] * BLOCK

    def teardown(self):
        """Whatever is left runs to its end: nobody waits for ever."""
        if not hasattr(self, "scheduler"):
            return
        s = self.scheduler
        for _ in range(600):
            if not (s.waiting or s.running or s.preempted or s.transferring or s.held or s.quarantined):
                break
            for request in list(s.transferring.values()):
                self.write(request, len(request.nodes) * BLOCK, request.ticket.num_tokens)
                self.slots[request.slot] = tuple(request.tokens[: request.ticket.num_tokens])
                s.transferred(request, request.ticket.num_tokens)
            for name in [*s.held, *s.quarantined]:
                s.release(name)
            self.transfers.clear()
            self.one_step()
        assert s.find_active(next(iter([*s.waiting, *s.running, *s.preempted]), "")) is None
        assert s.owned.cache.num_available_blocks == s.owned.blocks.capacity
        assert s.owned.cache.num_available_slots == s.owned.slots.capacity


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_random_lives_keep_all_memory_owned_once(mode):
    """About 10,000 steps over the three modes."""
    machine = type(f"LivesOfRequests_{mode}", (LivesOfRequests,), {"mode": mode})
    case = machine.TestCase
    case.settings = settings(
        max_examples=int(os.environ.get("TWINFANG_EXAMPLES", "100")),
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    case("runTest").runTest()
