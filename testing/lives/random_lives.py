"""Random lives of requests over pools, prefix cache, host memory, files and scheduler: all memory has exactly
one owner.

A modelled device computes the steps (:mod:`testing.lives.modelled_device`): it writes into each slot which
prefix its state belongs to, into each block which tokens it holds, and junk behind rejected drafts. Files are
modelled too (:mod:`testing.lives.modelled_files`): a read or a write moves a page at a time, between any two
events. The machine moves requests as the engine does: with one step launched before the last is read back,
with none, or in bursts. Time passes only when it says so.
"""

import random
from typing import get_args

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

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
from engine.session_calls import SessionCalls
from engine.step.burst import MAX_STEPS
from engine.step.checks import NoChecks
from testing.lives.file_rules import FileRules
from testing.lives.invariants import BLOCK, assert_owns_nothing
from testing.lives.modelled_device import ModelledDevice, answer_length, together
from wire.messages.handoff import Ticket
from wire.messages.sampling_params import SamplingParams
from wire.messages.sessions import NAME_BYTES, SessionAction, TendSession

STATE_BLOCK = 8
MAX_MODEL_LEN = 64
SESSIONS = ("1" * 2 * NAME_BYTES, "2" * 2 * NAME_BYTES)
KINDS = ("both", "kept", "prefill", "handed over", "resumed")
TRANSFER_ENDS = ("landed", "landed", "landed", "late", "failed")
PICK = st.integers(0, 99)
"""Picks one of those that there are."""
SIZES = StartSizes(BLOCK, block_bytes=1, slot_bytes=1, token_flops=100.0, pair_flops=1.0)


def _later(plan, number):
    """The rows of a burst's step: each earlier one has brought at least one token."""
    if not number:
        return plan
    rows = [row._replace(num_before=row.num_before + number) for row in plan.decode_rows]
    return StepPlan(rows, [])


class LivesOfRequests(FileRules):
    """Admit, chunk, decode, finish, cancel, preempt, evict, hand over, quarantine."""

    mode = "none"
    policy = "lru"

    @initialize(
        num_seqs_of_slots=st.integers(1, 5),
        num_more_slots=st.integers(0, 4),
        num_blocks=st.integers(18, 30),
        more_budget=st.integers(0, 16),
        max_num_seqs=st.integers(2, 5),
        steps_ahead=st.integers(0, 1),
        seed=st.integers(0, 1 << 16),
        host=st.tuples(st.integers(4, 60), st.integers(1, 3), st.integers(1, 30)),
        speeds=st.tuples(
            st.sampled_from([0.0, 0.125, 0.5]),
            st.sampled_from([0.125, 0.5, 2.0]),
            st.sampled_from([0.0, 4.0]),
        ),
        segments=st.tuples(st.integers(1, 4), st.integers(2, 8)),
    )
    def start(self, num_seqs_of_slots, num_more_slots, max_num_seqs, more_budget, **drawn):
        self.num_slots = 2 + num_seqs_of_slots * self.num_positions + num_more_slots
        self.max_num_seqs = max_num_seqs
        self.budget = max_num_seqs * self.num_positions + more_budget
        self.steps_ahead, self.seed = drawn["steps_ahead"], drawn["seed"]
        self.num_blocks, self.host_sizes = drawn["num_blocks"], drawn["host"]
        self.now, self.files = 0.0, None
        if self.has_files:
            self.make_files(drawn["speeds"], drawn["segments"])
        self.count = 0
        self.asked = []
        """The prompts so far, and their cache salts."""
        self.boot()

    def boot(self):
        """Starts the server's process. Files are as the last one has left them."""
        num_blocks, block_bytes = (self.num_blocks, 1) if self.has_kv else (1, 0)
        num_slots, slot_bytes = (self.num_slots, 1) if self.has_state else (1, 0)
        k = self.num_positions - 1
        plan = CapacityPlan(num_blocks, num_slots, BLOCK, block_bytes, slot_bytes, MAX_MODEL_LEN, k)
        eviction = placement = None
        if self.policy == "value":
            eviction = ValueEviction(SIZES)
            placement = StatePlacement(SIZES, lambda: eviction.price)
        tier = self.make_tier()
        self.scheduler = Scheduler(
            plan,
            make_cache_mode(self.mode, BLOCK, STATE_BLOCK, has_state=self.has_state, placement=placement),
            policy=eviction,
            tier=tier,
            files=self.make_file_tier(tier),
            max_num_seqs=self.max_num_seqs,
            max_batch_tokens=self.budget,
            num_positions=self.num_positions,
            burst_steps=MAX_STEPS if self.has_bursts else 1,
        )
        owned = self.scheduler.owned
        self.device = ModelledDevice(
            owned,
            num_positions=self.num_positions,
            block_size=BLOCK,
            luck=random.Random(self.seed),
            files=self.files,
        )
        self.tend_session = SessionCalls(owned, NoChecks(), self.device.move).tend
        self.make_choices(owned)
        self.transfers = []
        self.launches = []
        """The number of steps of each plan that is in flight."""
        self.waits = {}
        """Since when requests wait that could have been admitted, by their ids."""

    def make_tier(self):
        if not self.has_tier:
            return None
        num_pages, state_pages, step_pages = self.host_sizes
        memory = HostMemory(num_pages, 1, state_pages if self.has_state else 0, self.has_kv)
        journal = PrefixJournal({Tier.HOST: ReadCost(1.0, 0.1)})
        return HostTier(memory, step_bytes=step_pages, journal=journal)

    # --- the engine ------------------------------------------------------------------------------

    def one_step(self, choose_damaged=lambda requests: []):
        """What ``Engine.step`` does."""
        if self.scheduler.must_preempt:
            self.land_all()
        self.tell()
        plan = self.scheduler.schedule()
        self.device.move(plan)
        self.seen["steps"] += 1
        self.seen["promoted"] += len(plan.host_copies.promoted)
        self.check_waits(plan)
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
            self.launch(plan)
        self.land_all(but=0 if plan.is_empty else self.steps_ahead)

    @property
    def has_bursts(self):
        """Whether decode steps follow each other without a plan, in every second life."""
        return self.steps_ahead == 0 and self.seed % 2 == 0

    def launch(self, plan):
        num_steps = 1
        if self.has_bursts:
            most = min(MAX_STEPS, self.scheduler.decode.num_calm_steps(plan))
            num_steps = self.device.luck.randint(1, most)
        for number in range(num_steps):
            self.device.launch(_later(plan, number))
        self.scheduler.launched(plan, num_steps)
        self.launches.append(num_steps)
        self.seen["bursts"] += num_steps > 1

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
        while len(self.launches) > but:
            num_steps = self.launches.pop(0)
            flights = self.device.flights[:num_steps]
            outcomes = [together(steps) for steps in zip(*(one.outcomes for one in flights), strict=True)]
            rows = list(zip(flights[0].plan.rows, outcomes, strict=True))
            for row, outcome in rows:
                if row.request.finish_reason is None and row.samples and outcome.is_finite:
                    row.request.tokens += outcome.tokens
            # The step is over. What its successors in flight use is still watched.
            del self.device.flights[:num_steps]
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
        self.scheduler.landed(
            row, outcome.accepted, num_steps=outcome.num_steps, newest=outcome.newest or None
        )
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
        kind=st.sampled_from(KINDS),
        again=st.integers(-2, 4),
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
    def add(self, kind, again, family, shared, own, max_tokens, salt, client, **drawn):
        stops_after, breaks_after, session = drawn["stops_after"], drawn["breaks_after"], drawn["session"]
        self.count += 1
        beginning = [family] * shared
        if again > 0 and self.asked:  # as a conversation does
            beginning, salt = self.asked[-again % len(self.asked)]
            beginning = beginning[: 36 - shared % 8]
        tokens = beginning + [100 + (self.count * 7 + i) % 5 for i in range(own)]
        self.asked.append((tokens, salt))
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

    @rule(
        num=st.integers(1, 4),
        num_pages=st.sampled_from([0, 0, 1, 4, 30]),
        seconds=st.sampled_from([0.0, 0.0, 0.125, 1.0]),
    )
    def step(self, num, num_pages, seconds):
        for _ in range(num):
            self.one_step()
            self.now += seconds
            if self.files is not None:
                self.files.work(num_pages)

    @rule(session=st.sampled_from(SESSIONS), action=st.sampled_from(get_args(SessionAction)))
    def tend(self, session, action):
        into = "3" * len(session) if action == "fork" else ""
        self.tend_session(TendSession(session, action, "owner", into=into))

    @precondition(lambda self: self.steps_ahead == 0)  # only a sanitizing engine finds damage
    @rule(pick=PICK, num=st.integers(0, 2))
    def step_that_finds_damage(self, pick, num):
        self.one_step(lambda found: found[pick % len(found) :][:num] if found else [])

    @rule(pick=PICK, how=st.sampled_from(TRANSFER_ENDS))
    def end_transfer(self, pick, how):
        if not self.transfers:
            return
        request = self.transfers.pop(pick % len(self.transfers))
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

    @rule(pick=PICK)
    def release(self, pick):
        kept = {**self.scheduler.held, **self.scheduler.quarantined}
        if kept:
            request = kept[list(kept)[pick % len(kept)]]
            if request.request_id in self.scheduler.held:
                self.device.check(request, request.num_computed, request.memory.state_slot)
            else:
                self.device.receive_late(request)
            self.scheduler.release(request.request_id)
            assert_owns_nothing(request)

    @rule(pick=PICK)
    def cancel(self, pick):
        s = self.scheduler
        active = [*s.running, *s.waiting, *s.preempted, *s.transferring, *s.forks.waiting]
        if not active:
            return
        name = active[pick % len(active)]
        self.land_all()
        request = s.find_active(name)
        if request is None:
            return
        self.ended(request, "cancelled")
        if name in s.transferring:
            s.quarantine(request)
        else:
            self.leave(request)

    def teardown(self):
        """All remaining requests run to their end: no request waits without end."""
        if not hasattr(self, "scheduler"):
            return
        s = self.scheduler
        for _ in range(5000):
            if not self.everyone():
                break
            for request in list(s.transferring.values()):
                self.arrive(request)
            for name in [*s.held, *s.quarantined]:
                s.release(name)
            self.transfers.clear()
            self.one_step()
            self.pass_time()
        assert not self.everyone()
        self.land_all()
        if self.files is not None:
            self.files.end_all()
            self.one_step()
        s.owned.cache.clear()
        tier = s.owned.cache.tier
        assert tier._pages.num_free == tier._pages.capacity
        assert not tier._blocks
        assert s.owned.blocks.num_free == s.owned.blocks.capacity
        assert s.owned.slots.num_free == s.owned.slots.capacity
