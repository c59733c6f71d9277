"""Random lives of requests over pools, prefix cache, host memory and scheduler: all memory has exactly one
owner.

A modelled device computes the steps (:mod:`testing.engines.modelled_device`): it writes into each slot which
prefix its state belongs to, into each block which tokens it holds, and junk behind rejected drafts. The
machine moves requests as the engine does, with one step launched before the last is read back or none.
"""

import os
import random
from typing import get_args

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.memory.host_tier import HostMemory, HostTier
from engine.memory.prefix_journal import PrefixJournal, ReadCost, Tier
from engine.memory.start_sizes import StartSizes
from engine.memory.state_placement import StatePlacement
from engine.memory.value_eviction import ValueEviction
from engine.request import Request
from engine.schedule.cache_modes import make_cache_mode
from engine.schedule.capacity import CapacityPlan
from engine.schedule.scheduler import Scheduler
from engine.schedule.step_plan import StepPlan
from testing.engines.modelled_device import ModelledDevice, answer_length
from wire.messages.handoff import Ticket
from wire.messages.sampling_params import SamplingParams
from wire.messages.sessions import NAME_BYTES, SessionAction, TendSession

BLOCK = 4
STATE_BLOCK = 8
MAX_MODEL_LEN = 64
SESSIONS = ("1" * 2 * NAME_BYTES, "2" * 2 * NAME_BYTES)
SIZES = StartSizes(BLOCK, block_bytes=1, slot_bytes=1, token_flops=100.0, pair_flops=1.0)


def assert_owns_nothing(request):
    """Not a block, a slot or a row, and no anchor that could name one of its former life."""
    assert request.row == -1
    assert (request.memory.block_ids, request.memory.nodes, request.memory.slots) == ([], [], [])
    assert (request.memory.state_index, request.memory.read_slot, request.memory.read_state) == (0, 0, None)
    assert request.memory.boundary is None


class LivesOfRequests(RuleBasedStateMachine):
    """Admit, chunk, decode, finish, cancel, preempt, evict, hand over, quarantine."""

    mode = "none"
    policy = "lru"
    num_positions = 1
    has_state = has_kv = True
    has_tier = False

    @initialize(
        num_seqs_of_slots=st.integers(1, 5),
        num_more_slots=st.integers(0, 4),
        num_blocks=st.integers(18, 30),
        more_budget=st.integers(0, 16),
        max_num_seqs=st.integers(2, 5),
        steps_ahead=st.integers(0, 1),
        seed=st.integers(0, 1 << 16),
        host=st.tuples(st.integers(4, 60), st.integers(1, 3), st.integers(1, 30)),
    )
    def start(self, num_seqs_of_slots, num_more_slots, num_blocks, more_budget, max_num_seqs, **drawn):
        steps_ahead, seed = drawn["steps_ahead"], drawn["seed"]
        num_slots = 2 + num_seqs_of_slots * self.num_positions + num_more_slots
        num_blocks, block_bytes = (num_blocks, 1) if self.has_kv else (1, 0)
        num_slots, slot_bytes = (num_slots, 1) if self.has_state else (1, 0)
        k = self.num_positions - 1
        plan = CapacityPlan(num_blocks, num_slots, BLOCK, block_bytes, slot_bytes, MAX_MODEL_LEN, k)
        self.max_num_seqs = max_num_seqs
        self.budget = max_num_seqs * self.num_positions + more_budget
        self.steps_ahead = steps_ahead
        eviction = placement = None
        if self.policy == "value":
            eviction = ValueEviction(SIZES)
            placement = StatePlacement(SIZES, lambda: eviction.price)
        tier = None
        if self.has_tier:
            num_pages, state_pages, step_pages = drawn["host"]
            memory = HostMemory(num_pages, 1, state_pages if self.has_state else 0, self.has_kv)
            journal = PrefixJournal({Tier.HOST: ReadCost(1.0, 0.1)})
            tier = HostTier(memory, step_bytes=step_pages, journal=journal)
        self.scheduler = Scheduler(
            plan,
            make_cache_mode(self.mode, BLOCK, STATE_BLOCK, has_state=self.has_state, placement=placement),
            policy=eviction,
            tier=tier,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=self.budget,
            num_positions=self.num_positions,
        )
        self.device = ModelledDevice(
            self.scheduler.owned,
            num_positions=self.num_positions,
            block_size=BLOCK,
            luck=random.Random(seed),
        )
        self.transfers = []
        self.count = 0

    # --- the engine ------------------------------------------------------------------------------

    def one_step(self, choose_damaged=lambda requests: []):
        """What ``Engine.step`` does."""
        if self.scheduler.must_preempt:
            self.land_all()
        plan = self.scheduler.schedule()
        self.device.move(plan)
        for request in plan.prefilled:
            self.device.check(request, request.num_computed, request.memory.state_slot)
        self.transfers += plan.to_transfer
        damaged = choose_damaged([*(row.request for row in plan.rows), *plan.prefilled])
        if damaged:
            plan = self.scheduler.discard(plan, damaged)
            for request in damaged:
                self.ended(request, "error")
                assert_owns_nothing(request)
        assert not any(request in plan.prefilled for request in damaged)
        self.check_plan(plan)
        if not plan.is_empty:
            self.device.launch(plan)
            self.scheduler.launched(plan)
        self.land_all(but=0 if plan.is_empty else self.steps_ahead)

    def check_plan(self, plan):
        assert all(row.is_decode for row in plan.decode_rows)
        assert not any(row.is_decode for row in plan.prefill_rows)
        assert len({row.request.request_id for row in plan.rows}) == len(plan.rows)
        for row in plan.prefill_rows:
            pending = row.request.memory.boundary
            assert pending is None or pending.length <= row.num_before, "a chunk passes what it won't write"
        num_tokens = len(plan.decode_rows) * self.num_positions
        assert num_tokens + sum(row.num_new for row in plan.prefill_rows) <= self.budget

    def land_all(self, but=0):
        while len(self.device.flights) > but:
            flight = self.device.flights[0]
            rows = list(zip(flight.plan.rows, flight.outcomes, strict=True))
            for row, outcome in rows:
                if row.request.finish_reason is None and row.samples and outcome.is_finite:
                    row.request.tokens += outcome.tokens
            # The step is over. What its successors in flight use is still watched.
            self.device.flights.pop(0)
            for row, outcome in rows:
                if row.request.finish_reason is None:
                    self.land(row, outcome)

    def land(self, row, outcome):
        request = row.request
        assert outcome.accepted > 0, "the device ended a row that the host goes on with"
        if not outcome.is_finite:
            self.ended(request, "error")
            self.scheduler.owned.give_up(row)
            self.leave(request)
            return
        self.scheduler.landed(row, outcome.accepted)
        assert request.num_computed == outcome.length
        assert request.memory.state_slot == outcome.state_slot
        ahead = [r.num_new for f in self.device.flights for r in f.plan.rows if r.request is request]
        assert request.num_in_flight == len(ahead)
        assert request.num_planned == outcome.length + sum(ahead)
        if row.samples and request.num_output == answer_length(request):
            self.ended(request, "length")
            if request.keeps_state and self.scheduler.may_keep:
                self.hold(request)
            else:
                self.leave(request)
        elif request.prefill_only and request.num_computed == request.target:
            self.hold(request)

    def ended(self, request, reason):
        """Forks that still wait end with the request that was to compute their prompt."""
        request.finish_reason = reason
        for fork in self.scheduler.forks.take(request):
            self.ended(fork, "moved")

    def hold(self, request):
        self.scheduler.hold(request)
        self.device.check(request, request.num_computed, request.memory.state_slot)

    def leave(self, request):
        self.device.host.pop(request.request_id, None)
        self.scheduler.finish(request)
        assert_owns_nothing(request)

    # --- rules -----------------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from(["both", "kept", "prefill", "handed over", "resumed"]),
        family=st.integers(0, 2),
        shared=st.integers(0, 36),
        own=st.integers(1, 16),
        max_tokens=st.integers(1, 12),
        stops_after=st.sampled_from([0, 0, 1, 3, 6]),
        breaks_after=st.sampled_from([0, 0, 0, 0, 1, 4]),
        speculate=st.sampled_from([True, True, True, False]),
        salt=st.sampled_from(["", "", "x"]),
        client=st.sampled_from("aab"),
        num_forks=st.sampled_from([0, 0, 0, 1, 3, 7]),
        session=st.sampled_from(["", *SESSIONS]),
    )
    def add(self, kind, family, shared, own, max_tokens, salt, client, **drawn):
        stops_after, breaks_after, session = drawn["stops_after"], drawn["breaks_after"], drawn["session"]
        self.count += 1
        tokens = [family] * shared + [100 + (self.count * 7 + i) % 5 for i in range(own)]
        name = f"r{self.count}"
        if len(tokens) < 2:
            kind = "both"
        ticket = None
        if kind in ("handed over", "resumed"):
            length = len(tokens) - 1 if kind == "handed over" else max(1, len(tokens) - own - 1)
            block_ids = (1,) * (-(-length // BLOCK) if self.has_kv else 0)
            ticket = Ticket(name, 0, 0, "h:1", "i", length, block_ids, int(self.has_state), 1.0)
        params = None
        if kind not in ("prefill", "resumed"):
            params = SamplingParams(max_tokens=max_tokens, speculate=drawn["speculate"])
        request = Request(
            *(name, tokens, params),
            ticket=ticket,
            cache_salt=salt,
            keeps_state=kind == "kept",
            client=client,
            session=session,
        )
        if kind in ("both", "handed over") and len(tokens) > 1:
            request.forks = [
                Request(f"{name}-{i}", list(tokens), params, cache_salt=salt, client=client)
                for i in range(drawn["num_forks"])
            ]
        for one in (request, *request.forks):
            one.stops_after, one.breaks_after = stops_after, breaks_after
        self.scheduler.add(request)

    @rule(num=st.integers(1, 4))
    def step(self, num):
        for _ in range(num):
            self.one_step()

    @rule(session=st.sampled_from(SESSIONS), action=st.sampled_from(get_args(SessionAction)))
    def tend(self, session, action):
        owned = self.scheduler.owned  # what engine.session_calls does
        into = "3" * len(session) if action == "fork" else ""
        owned.sessions.tend(TendSession(session, action, "owner", into=into))
        self.device.move(StepPlan([], [], host_copies=owned.cache.tier.take()))

    @precondition(lambda self: self.steps_ahead == 0)  # only a sanitizing engine finds damage
    @rule(data=st.data())
    def step_that_finds_damage(self, data):
        self.one_step(lambda found: data.draw(st.lists(st.sampled_from(found), max_size=2)) if found else [])

    @rule(data=st.data(), how=st.sampled_from(["landed", "landed", "landed", "late", "failed"]))
    def end_transfer(self, data, how):
        if not self.transfers:
            return
        request = self.transfers.pop(data.draw(st.integers(0, len(self.transfers) - 1)))
        if request.request_id not in self.scheduler.transferring:
            return
        if how == "landed":
            self.arrive(request)
        else:
            self.ended(request, "error")
            self.scheduler.quarantine(request)
            if how == "failed":
                self.scheduler.release(request.request_id)
                assert_owns_nothing(request)

    def arrive(self, request):
        length = request.ticket.num_tokens
        self.device.receive(request, length)
        self.scheduler.transferred(request, length)
        self.device.begin(request)

    @rule(data=st.data())
    def release(self, data):
        kept = {**self.scheduler.held, **self.scheduler.quarantined}
        if kept:
            request = kept[data.draw(st.sampled_from(list(kept)))]
            if request.request_id in self.scheduler.held:
                self.device.check(request, request.num_computed, request.memory.state_slot)
            else:
                self.device.receive_late(request)
            self.scheduler.release(request.request_id)
            assert_owns_nothing(request)

    @rule(data=st.data())
    def cancel(self, data):
        s = self.scheduler
        active = [*s.running, *s.waiting, *s.preempted, *s.transferring, *s.forks.waiting]
        if not active:
            return
        name = data.draw(st.sampled_from(active))
        self.land_all()
        request = s.find_active(name)
        if request is None:
            return
        self.ended(request, "cancelled")
        if name in s.transferring:
            s.quarantine(request)
        else:
            self.leave(request)

    # --- invariants ------------------------------------------------------------------------------

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
        assert [set(tier.added) for tier in news.tiers] == [in_host - serving] * self.has_tier

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

    def teardown(self):
        """All remaining requests run to their end: no request waits without end."""
        if not hasattr(self, "scheduler"):
            return
        s = self.scheduler
        for _ in range(600):
            if not self.everyone():
                break
            for request in list(s.transferring.values()):
                self.arrive(request)
            for name in [*s.held, *s.quarantined]:
                s.release(name)
            self.transfers.clear()
            self.one_step()
        assert not self.everyone()
        self.land_all()
        s.owned.cache.clear()
        tier = s.owned.cache.tier
        assert tier._pages.num_free == tier._pages.capacity
        assert not tier._blocks
        assert s.owned.blocks.num_free == s.owned.blocks.capacity
        assert s.owned.slots.num_free == s.owned.slots.capacity


def run_lives(max_examples, lives=LivesOfRequests, **members):
    machine = type(f"{lives.__name__}_{'_'.join(map(str, members.values()))}", (lives,), members)
    case = machine.TestCase
    case.settings = settings(
        max_examples=int(os.environ.get("TWINFANG_EXAMPLES", max_examples)),
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    case("runTest").runTest()
