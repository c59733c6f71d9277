"""The scheduler admits requests in order of arrival, fills the budget, and gets every block and slot back."""

import pytest

from engine.request import Request
from testing.engines.schedulers import compute, land, make_scheduler
from wire.errors import ContextLengthError, InvalidRequestError
from wire.messages.handoff import Ticket
from wire.messages.sampling_params import SamplingParams


def request(name, num_tokens, max_tokens=4):
    return Request(name, list(range(num_tokens)), SamplingParams(max_tokens=max_tokens))


def prefill_only(name, num_tokens):
    return Request(name, list(range(num_tokens)), params=None)


def handed_over(name, num_tokens, max_tokens=4):
    ticket = Ticket(name, 0, 0, "h:1", "i", num_tokens - 1, (1,), 1, 1.0)
    return Request(name, list(range(num_tokens)), SamplingParams(max_tokens=max_tokens), ticket=ticket)


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
        compute(scheduler, plan)
    assert seen == [([], [("a", 8)]), ([], [("a", 8)]), ([], [("a", 4)]), ([("a", 1)], [])]


def test_prompts_of_one_token_share_steps_beside_many_rows():
    """Each step that one begins in is slow for all rows."""
    scheduler = make_scheduler(max_num_seqs=16, num_blocks=200, num_slots=40, max_batch_tokens=64)
    for number in range(8):
        scheduler.add(request(f"long{number}", 4, max_tokens=60))
    compute(scheduler, scheduler.schedule())
    mixed = []
    for number in range(40):
        if number % 10 == 0:
            scheduler.add(request(f"short{number}", 1, max_tokens=60))
        plan = scheduler.schedule()
        mixed.append([row.request.request_id for row in plan.prefill_rows])
        compute(scheduler, plan)
    begun = {step: names for step, names in enumerate(mixed) if names}
    assert begun == {0: ["short0"], 16: ["short10"], 32: ["short20", "short30"]}


def test_a_prompt_of_one_token_begins_at_once_beside_few_rows():
    scheduler = make_scheduler(max_num_seqs=8, num_blocks=200, num_slots=40)
    for number in range(3):
        scheduler.add(request(f"r{number}", 1, max_tokens=60))
        plan = scheduler.schedule()
        assert [row.request.request_id for row in plan.prefill_rows] == [f"r{number}"]
        compute(scheduler, plan)


def test_a_last_chunk_of_one_token_is_a_decode_row():
    scheduler = make_scheduler()
    scheduler.add(request("a", 9))
    compute(scheduler, scheduler.schedule())
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
    compute(scheduler, scheduler.schedule())
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
    compute(scheduler, scheduler.schedule())
    assert a.num_computed == a.target == 8
    scheduler.hold(a)
    assert scheduler.owned.blocks.num_free == 32 - 2
    assert scheduler.owned.slots.num_free == 3
    scheduler.release("a")
    scheduler.release("a")
    assert scheduler.owned.blocks.num_free == 32
    assert scheduler.owned.slots.num_free == 4


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


def test_equal_prompts_share_all_memory_and_still_hold_no_more_leases_than_there_are():
    """Blocks and state of equal prompts are the prefix cache's; only the number of leases bounds them."""
    scheduler = make_scheduler(mode="all", max_batch_tokens=64)
    for i in range(30):
        scheduler.add(prefill_only(f"r{i}", 9))
    done = 0
    for _ in range(200):
        plan = scheduler.schedule()
        compute(scheduler, plan)
        for row in plan.rows:
            if row.request.num_computed == row.request.target:
                scheduler.hold(row.request)
        assert len(scheduler.held) <= 4, "one fewer than the pool's slots, the null slot included"
        if plan.is_empty and scheduler.held:
            scheduler.release(next(iter(scheduler.held)))
            done += 1
    assert done == 30


# --- drafts, and steps in flight -------------------------------------------------------------------


def launch(scheduler):
    plan = scheduler.schedule()
    scheduler.launched(plan)
    return plan


def test_a_decode_row_takes_all_its_positions_from_the_budget():
    scheduler = make_scheduler(k=3, num_slots=20, max_batch_tokens=10)
    scheduler.add(request("a", 3))
    compute(scheduler, scheduler.schedule())
    scheduler.add(request("b", 30))
    assert shape(scheduler.schedule()) == ([("a", 1)], [("b", 6)])


def test_a_chunk_of_one_token_waits_where_the_budget_has_no_room_for_a_decode_row():
    """Such a row is as wide as all others of a uniform batch."""
    scheduler = make_scheduler(k=3, num_slots=40, max_num_seqs=2, mode="all")
    cached = prefill_only("cached", 9)
    scheduler.add(cached)
    compute(scheduler, scheduler.schedule())
    scheduler.finish(cached)
    scheduler.add(Request("a", [50] * 7, SamplingParams(max_tokens=4)))
    scheduler.add(request("b", 20))
    plan = scheduler.schedule()
    assert [r.num_computed for r in scheduler.running.values()] == [0, 8]
    assert shape(plan) == ([], [("a", 7)])
    compute(scheduler, plan)
    assert shape(scheduler.schedule()) == ([("a", 1)], [("b", 4)])


def test_a_chunk_is_planned_behind_one_in_flight_and_starts_from_its_slot():
    scheduler = make_scheduler()
    a = request("a", 20)
    scheduler.add(a)
    first, second = launch(scheduler), scheduler.schedule()
    assert [(row.num_before, row.num_new) for row in (*first.rows, *second.rows)] == [(0, 8), (8, 8)]
    assert a.num_computed == 0
    assert a.next_state_slot == first.rows[0].write_slot


def test_a_decode_row_behind_one_in_flight_has_room_for_the_most_that_this_one_may_accept():
    scheduler = make_scheduler(k=3, num_slots=20, max_batch_tokens=16)
    a = request("a", 8, max_tokens=40)
    scheduler.add(a)
    compute(scheduler, scheduler.schedule())
    assert len(a.memory.block_ids) == 4, "8 tokens, 3 drafts behind them, and as many in their looping"
    first = launch(scheduler)
    assert len(a.memory.block_ids) == 4, "8 tokens, 4 positions, and 3 that are drafted behind them"
    second = launch(scheduler)
    assert len(a.memory.block_ids) == 5, "the first may have accepted 4 of them"
    assert [row.num_before for row in (*first.rows, *second.rows)] == [8, 9], "the least that it can be"
    land(scheduler, first, num_accepted=4)
    assert (a.num_computed, a.num_planned) == (12, 13)
    land(scheduler, second, num_accepted=2)
    assert (a.num_computed, a.num_planned) == (14, 14)


def test_a_request_that_surely_ends_in_flight_is_not_planned_again():
    scheduler = make_scheduler(k=1, num_slots=20)
    scheduler.add(request("a", 4, max_tokens=2))
    compute(scheduler, scheduler.schedule())
    launch(scheduler)
    assert scheduler.schedule().is_empty


@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_the_state_of_the_last_accepted_position_is_where_the_next_step_starts(accepted):
    scheduler = make_scheduler(k=3, num_slots=20, max_batch_tokens=16)
    a = request("a", 5, max_tokens=40)
    scheduler.add(a)
    compute(scheduler, scheduler.schedule())
    assert a.memory.state_slot == a.memory.slots[0]
    compute(scheduler, scheduler.schedule(), accepted)
    assert a.memory.state_slot == a.memory.slots[accepted - 1]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("accepted", "is_newest"), [((1, 1), False), ((1, 2), True), ((3, 1), True)])
def test_a_boundary_stays_pending_until_it_is_passed_in_this_step_or_in_a_later_one(
    accepted, is_newest, ahead
):
    """The state at 8 tokens, from 5 on: passed at 7 + … not yet, at the second step, or inside the first."""
    scheduler = make_scheduler(k=3, num_slots=20, max_batch_tokens=16, mode="all")
    a = request("a", 5, max_tokens=40)
    scheduler.add(a)
    compute(scheduler, scheduler.schedule())
    first = launch(scheduler)
    (boundary,) = first.rows[0].boundaries
    assert boundary.length == 8
    if not ahead:
        land(scheduler, first, accepted[0])
    second = launch(scheduler)
    if ahead:
        assert second.rows[0].boundaries == (boundary,), "it is not known yet who passes it"
        land(scheduler, first, accepted[0])
    assert (a.memory.boundary is boundary) == (accepted[0] < 3)
    land(scheduler, second, accepted[1])
    assert (a.memory.boundary is boundary) == (sum(accepted) < 3)
    assert (scheduler.owned.cache.num_cached_states + (a.memory.read_state is not None) >= 2) == is_newest


def test_a_decode_row_within_the_prompt_takes_no_boundary_that_it_cannot_pass():
    """The chunk after it would not write there, and the slot would enter the cache with nothing in it."""
    scheduler = make_scheduler(k=3, num_slots=20, max_batch_tokens=16, mode="all")
    a = request("a", 20)
    scheduler.add(a)
    scheduler.schedule()
    a.num_planned, a.num_in_flight = 5, 1
    assert scheduler.decode.plan_as_is(a, 5).boundaries == ()
    a.num_planned = 7
    assert [boundary.length for boundary in scheduler.decode.plan_as_is(a, 7).boundaries] == [8]


# --- anchors ---------------------------------------------------------------------------------------


def decoding(kind, **settings):
    """A scheduler whose request has all that can name a state: positions, a slot to read, a boundary."""
    scheduler = make_scheduler(k=3, num_slots=20, max_batch_tokens=16, mode="all", **settings)
    a = request("a", 5, max_tokens=40)
    scheduler.add(a)
    compute(scheduler, scheduler.schedule())
    if kind == "a slot to read":
        compute(scheduler, scheduler.schedule(), 3)
        assert (a.memory.read_slot, a.memory.state_index) == (a.memory.read_state.slot, 2)
    elif kind == "a slot to read of its own":
        node = a.memory.nodes[0]
        compute(scheduler, scheduler.schedule(), 2)
        plan = scheduler.schedule()
        scheduler.launched(plan)
        # An equal request was faster: the cache has that state.
        cache = scheduler.owned.cache
        a.tokens += [0]
        cache.lengthen_keys(a.block_keys, [*a.tokens, 0], 8, "")
        cache.extend(a.memory.nodes, a.block_keys, 2, a.memory.block_ids)
        cache.release_state(cache.put_state(a.memory.nodes[1], cache.allocate_slot()))
        scheduler.landed(plan.rows[0], 1)
        assert node is a.memory.nodes[0]
        assert a.memory.read_slot
        assert a.memory.read_state is None
    else:
        compute(scheduler, scheduler.schedule(), 2)
        assert (a.memory.boundary.length, a.memory.state_index) == (8, 1)
    return scheduler, a


ANCHORS = pytest.mark.parametrize("kind", ["a boundary", "a slot to read", "a slot to read of its own"])


def assert_no_anchor(a):
    assert (
        a.memory.slots,
        a.memory.state_index,
        a.memory.read_slot,
        a.memory.read_state,
        a.memory.boundary,
    ) == ([], 0, 0, None, None)


@ANCHORS
def test_a_request_that_leaves_drops_its_anchors_and_their_slots(kind):
    scheduler, a = decoding(kind)
    scheduler.finish(a)
    assert_no_anchor(a)
    scheduler.owned.cache.clear()
    assert scheduler.owned.slots.num_free == scheduler.owned.slots.capacity
    assert scheduler.owned.blocks.num_free == scheduler.owned.blocks.capacity


@ANCHORS
def test_a_request_that_is_held_keeps_one_slot_and_nothing_that_is_pending(kind):
    scheduler, a = decoding(kind)
    before = a.memory.state_slot
    scheduler.hold(a)
    assert a.memory.state_slot == before
    assert a.memory.boundary is None
    assert a.memory.slots == ([] if kind == "a slot to read" else [before])
    scheduler.release("a")
    assert_no_anchor(a)
    scheduler.owned.cache.clear()
    assert scheduler.owned.slots.num_free == scheduler.owned.slots.capacity


@ANCHORS
def test_a_preempted_request_comes_back_with_its_state_in_its_first_slot_and_no_anchors(kind):
    scheduler, a = decoding(kind)
    before = a.memory.state_slot
    swap = scheduler._preempt(a)
    assert swap.slot == before
    assert_no_anchor(a)
    plan = scheduler.schedule()
    assert [swap.slot for swap in plan.swap_in] == [a.memory.slots[0]]
    assert (a.memory.state_slot, a.memory.state_index, a.memory.read_slot) == (a.memory.slots[0], 0, 0)
    assert plan.rows[0].num_before == a.num_computed == a.num_planned


def test_slots_that_a_chunk_was_given_come_back_if_its_request_leaves_before_it_lands():
    scheduler = make_scheduler(num_slots=20, max_batch_tokens=32, mode="all")
    a = request("a", 20)
    scheduler.add(a)
    plan = scheduler.schedule()
    assert plan.rows[0].boundaries
    scheduler.discard(plan, [a])
    assert scheduler.owned.slots.num_free == scheduler.owned.slots.capacity


def test_a_prefilled_request_that_turns_out_damaged_is_not_held():
    scheduler = make_scheduler(num_slots=20, mode="align")
    for name in ("first", "second"):
        scheduler.add(prefill_only(name, 9))
        plan = scheduler.schedule()
        compute(scheduler, plan)
        if plan.rows:
            scheduler.hold(plan.rows[0].request)
    (second,) = plan.prefilled
    assert scheduler.discard(plan, [second]).prefilled == []
    assert list(scheduler.held) == ["first"]
    assert_no_anchor(second)


def test_queued_tokens_are_those_that_were_given_and_not_computed():
    scheduler = make_scheduler(max_num_seqs=2)
    assert scheduler.num_queued_tokens == 0
    scheduler.add(request("a", 12))
    scheduler.add(prefill_only("b", 6))
    scheduler.add(request("c", 3))
    assert scheduler.num_queued_tokens == 12 + 5 + 3
    compute(scheduler, scheduler.schedule())
    assert scheduler.num_queued_tokens == 12 + 5 + 3 - 8
    while scheduler.running or scheduler.waiting:
        plan = scheduler.schedule()
        compute(scheduler, plan)
        for row in plan.rows:
            one = row.request
            if one.num_output >= 4 or (one.prefill_only and one.num_computed >= one.target):
                scheduler.finish(one)
    assert scheduler.num_queued_tokens == 0
