"""The scheduler admits first come, first served, fills the budget, and returns every block and slot."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.capacity import CapacityPlan
from engine.request import Request
from engine.scheduler import Scheduler
from wire.errors import ContextLengthError, InvalidRequestError
from wire.handoff import Ticket
from wire.sampling_params import SamplingParams


def capacity(num_blocks=33, num_slots=5, block_size=4, max_model_len=64):
    return CapacityPlan(num_blocks, num_slots, block_size, 1, 1, max_model_len)


def make_scheduler(max_num_seqs=4, max_batch_tokens=8, **sizes):
    return Scheduler(capacity(**sizes), max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens)


def request(name, num_tokens, max_tokens=4):
    return Request(name, list(range(num_tokens)), SamplingParams(max_tokens=max_tokens))


def prefill_only(name, num_tokens):
    return Request(name, list(range(num_tokens)), params=None)


def handed_over(name, num_tokens, max_tokens=4):
    ticket = Ticket(name, 0, 0, "h:1", "i", num_tokens - 1, (1,), 1, 1.0)
    return Request(name, list(range(num_tokens)), SamplingParams(max_tokens=max_tokens), ticket=ticket)


def compute(plan):
    """What the engine does to requests in a step."""
    for row in plan.rows:
        row.request.num_computed += row.num_new
        if row.samples:
            row.request.tokens.append(0)


def shape(plan):
    return (
        [(row.request.request_id, row.num_new) for row in plan.decode_rows],
        [(row.request.request_id, row.num_new) for row in plan.prefill_rows],
    )


def test_a_long_prompt_runs_in_chunks_within_the_budget():
    scheduler = make_scheduler()
    scheduler.add(request("a", 20))
    seen = []
    for _ in range(4):
        plan = scheduler.schedule()
        seen.append(shape(plan))
        compute(plan)
    assert seen == [([], [("a", 8)]), ([], [("a", 8)]), ([], [("a", 4)]), ([("a", 1)], [])]


def test_a_last_chunk_of_one_token_is_a_decode_row():
    scheduler = make_scheduler()
    scheduler.add(request("a", 9))
    compute(scheduler.schedule())
    plan = scheduler.schedule()
    assert shape(plan) == ([("a", 1)], [])
    assert plan.decode_rows[0].samples


def test_the_first_token_of_a_prompt_is_a_prefill_row_even_alone():
    scheduler = make_scheduler()
    scheduler.add(request("a", 1))
    assert shape(scheduler.schedule()) == ([], [("a", 1)])


def test_decode_rows_come_first_and_prompts_get_what_is_left_of_the_budget():
    scheduler = make_scheduler()
    scheduler.add(request("a", 3))
    compute(scheduler.schedule())
    scheduler.add(request("b", 30))
    assert shape(scheduler.schedule()) == ([("a", 1)], [("b", 7)])


def test_a_handed_over_request_waits_for_its_transfer_and_then_decodes_at_once():
    scheduler = make_scheduler()
    scheduler.add(handed_over("a", 10))
    plan = scheduler.schedule()
    assert plan.is_empty
    assert [r.request_id for r in plan.to_transfer] == ["a"]
    assert scheduler.schedule().is_empty
    scheduler.transferred(plan.to_transfer[0], 9)
    plan = scheduler.schedule()
    assert shape(plan) == ([("a", 1)], [])
    assert plan.decode_rows[0].num_before == 9


def test_a_prefilled_request_keeps_its_memory_until_it_is_released():
    scheduler = make_scheduler()
    a = prefill_only("a", 9)
    scheduler.add(a)
    compute(scheduler.schedule())
    assert a.num_computed == a.target == 8
    scheduler.hold(a)
    assert scheduler.blocks.num_free == 32 - 2
    assert scheduler.slots.num_free == 3
    scheduler.release("a")
    scheduler.release("a")
    assert scheduler.blocks.num_free == 32
    assert scheduler.slots.num_free == 4


def test_quarantined_memory_is_not_handed_out_before_it_is_released():
    scheduler = make_scheduler(num_slots=2)
    scheduler.add(handed_over("a", 10))
    scheduler.add(request("b", 3))
    (a,) = scheduler.schedule().to_transfer
    scheduler.quarantine(a)
    assert scheduler.schedule().is_empty
    scheduler.release("a")
    assert shape(scheduler.schedule()) == ([], [("b", 3)])


def test_requests_are_admitted_in_order_even_if_a_later_one_would_fit():
    scheduler = make_scheduler(num_blocks=9, max_model_len=32)
    scheduler.add(request("a", 20))
    scheduler.add(request("b", 20))
    scheduler.add(request("c", 1, max_tokens=1))
    scheduler.schedule()
    assert list(scheduler.running) == ["a"]
    assert list(scheduler.waiting) == ["b", "c"]


@pytest.mark.parametrize(("num_tokens", "fits"), [(60, True), (61, False)])
def test_prompt_and_answer_must_fit_the_context(num_tokens, fits):
    scheduler = make_scheduler()
    if fits:
        scheduler.add(request("a", num_tokens))
    else:
        with pytest.raises(
            ContextLengthError, match="61 tokens and an answer of up to 4 exceed the context of 64"
        ):
            scheduler.add(request("a", num_tokens))


def test_a_request_id_in_use_is_refused():
    scheduler = make_scheduler()
    scheduler.add(request("a", 3))
    with pytest.raises(InvalidRequestError, match="in use"):
        scheduler.add(request("a", 3))


class SchedulerMachine(RuleBasedStateMachine):
    """Random lives of requests; after each step all memory has exactly one owner."""

    @initialize(num_slots=st.integers(2, 6), num_blocks=st.integers(17, 40), budget=st.integers(4, 20))
    def start(self, num_slots, num_blocks, budget):
        self.scheduler = make_scheduler(max_batch_tokens=budget, num_slots=num_slots, num_blocks=num_blocks)
        self.transfers = []
        self.count = 0

    @rule(kind=st.sampled_from([request, prefill_only, handed_over]), num_tokens=st.integers(2, 50))
    def add(self, kind, num_tokens):
        self.count += 1
        self.scheduler.add(kind(f"r{self.count}", num_tokens))

    @rule()
    def step(self):
        plan = self.scheduler.schedule()
        assert sum(row.num_new for row in plan.rows) <= self.scheduler._max_batch_tokens
        assert all(row.is_decode for row in plan.decode_rows)
        assert not any(row.is_decode for row in plan.prefill_rows)
        self.transfers += plan.to_transfer
        compute(plan)
        for row in plan.rows:
            one = row.request
            if one.prefill_only and one.num_computed == one.target:
                self.scheduler.hold(one)
            elif one.params and one.num_output == one.params.max_tokens:
                self.scheduler.finish(one)

    @rule(data=st.data(), settled=st.booleans())
    def end_transfer(self, data, settled):
        if self.transfers:
            one = self.transfers.pop(data.draw(st.integers(0, len(self.transfers) - 1)))
            if one.request_id in self.scheduler.transferring:
                if settled:
                    self.scheduler.transferred(one, one.ticket.num_tokens)
                else:
                    self.scheduler.quarantine(one)

    @rule(data=st.data())
    def release(self, data):
        kept = [*self.scheduler.held, *self.scheduler.quarantined]
        if kept:
            self.scheduler.release(data.draw(st.sampled_from(kept)))

    @rule(data=st.data())
    def cancel(self, data):
        active = [*self.scheduler.running, *self.scheduler.waiting]
        if active:
            self.scheduler.finish(self.scheduler.find_active(data.draw(st.sampled_from(active))))

    @invariant()
    def all_memory_has_one_owner(self):
        s = self.scheduler
        places = [s.waiting, s.transferring, s.running, s.held, s.quarantined]
        everyone = [one for place in places for one in place.values()]
        assert len({one.request_id for one in everyone}) == len(everyone)
        blocks = [block for one in everyone for block in one.block_ids]
        slots = [one.slot for one in everyone if one.slot]
        rows = [one.row for one in everyone if one.row >= 0]
        assert len(set(blocks)) == len(blocks) == s.blocks.capacity - s.blocks.num_free
        assert len(set(slots)) == len(slots) == s.slots.capacity - s.slots.num_free
        assert len(set(rows)) == len(rows) == s._max_num_seqs - len(s._rows)
        assert 0 not in blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
