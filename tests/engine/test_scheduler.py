"""The scheduler admits first come, first served, fills the budget, and returns every block and slot."""

import pytest

from engine.cache_modes import make_cache_mode
from engine.capacity import CapacityPlan
from engine.request import Request
from engine.scheduler import Scheduler
from wire.errors import ContextLengthError, InvalidRequestError
from wire.handoff import Ticket
from wire.sampling_params import SamplingParams


def capacity(num_blocks=33, num_slots=5, block_size=4, max_model_len=64):
    return CapacityPlan(num_blocks, num_slots, block_size, 1, 1, max_model_len)


def make_scheduler(max_num_seqs=4, max_batch_tokens=8, mode="none", state_block=8, **sizes):
    plan = capacity(**sizes)
    return Scheduler(
        plan,
        make_cache_mode(mode, plan.block_size, state_block),
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
    )


def request(name, num_tokens, max_tokens=4):
    return Request(name, list(range(num_tokens)), SamplingParams(max_tokens=max_tokens))


def prefill_only(name, num_tokens):
    return Request(name, list(range(num_tokens)), params=None)


def handed_over(name, num_tokens, max_tokens=4):
    ticket = Ticket(name, 0, 0, "h:1", "i", num_tokens - 1, (1,), 1, 1.0)
    return Request(name, list(range(num_tokens)), SamplingParams(max_tokens=max_tokens), ticket=ticket)


def compute(scheduler, plan):
    """What the engine does to requests in a step."""
    for row in plan.rows:
        scheduler.computed(row)
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
        compute(scheduler, plan)
    assert seen == [([], [("a", 8)]), ([], [("a", 8)]), ([], [("a", 4)]), ([("a", 1)], [])]


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
