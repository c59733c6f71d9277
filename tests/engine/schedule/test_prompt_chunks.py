"""Long prompts let shorter ones pass, and go on themselves."""

from engine.request import Request
from testing.engines.schedulers import compute, make_scheduler
from wire.messages.sampling_params import SamplingParams


def request(name, num_tokens, max_tokens=4):
    return Request(name, list(range(num_tokens)), SamplingParams(max_tokens=max_tokens))


def prompts(plan):
    return [(row.request.request_id, row.num_new) for row in plan.prefill_rows]


def test_a_long_prompt_leaves_half_of_a_step_to_short_ones_behind_it():
    scheduler = make_scheduler(max_num_seqs=8, num_blocks=200)
    scheduler.add(request("long", 40))
    for name in "abc":
        scheduler.add(request(name, 3))
    seen = []
    for _ in range(4):
        plan = scheduler.schedule()
        seen.append(prompts(plan))
        compute(scheduler, plan)
    assert seen == [
        [("long", 4), ("a", 3), ("b", 1)],
        [("long", 4), ("b", 2), ("c", 1)],  # beside a, which decodes
        [("long", 4), ("c", 2)],
        [("long", 5)],
    ]


def test_a_long_prompt_is_never_held_up_by_short_ones():
    sizes = {"num_blocks": 400, "num_slots": 80, "max_model_len": 1000}
    scheduler = make_scheduler(max_num_seqs=60, max_batch_tokens=64, **sizes)
    scheduler.add(request("long", 640))
    num_steps = 0
    while scheduler.find_active("long").num_computed < 640:
        for i in range(20):
            scheduler.add(request(f"short {num_steps}, {i}", 20, max_tokens=1))
        plan = scheduler.schedule()
        compute(scheduler, plan)
        for row in plan.rows:
            if row.samples and row.request.request_id != "long":
                scheduler.finish(row.request)
        num_steps += 1
    assert num_steps <= 640 / (64 / 2), "it gets half of each step"


def test_prompts_at_the_threshold_are_computed_in_order_of_arrival():
    scheduler = make_scheduler(max_num_seqs=8, num_blocks=200, long_prefill_threshold=20)
    scheduler.add(request("a", 20))
    scheduler.add(request("b", 3))
    plan = scheduler.schedule()
    assert prompts(plan) == [("a", 8)]


def test_prompts_share_a_step_only_up_to_a_number_of_tokens():
    scheduler = make_scheduler(max_batch_tokens=64, num_blocks=200, joined_prompt_tokens=16)
    for name, num_tokens in {"a": 8, "b": 8, "c": 1 + 16, "d": 3}.items():
        scheduler.add(request(name, num_tokens, max_tokens=1))
    seen = []
    for _ in range(3):
        plan = scheduler.schedule()
        seen.append(prompts(plan))
        compute(scheduler, plan)
        for row in plan.rows:
            scheduler.finish(row.request)
    assert seen == [[("a", 8), ("b", 8)], [("c", 17)], [("d", 3)]]


def test_a_long_prompt_shares_its_step_with_short_ones_whatever_their_number():
    sizes = {"num_blocks": 200, "max_model_len": 200}
    scheduler = make_scheduler(max_batch_tokens=64, joined_prompt_tokens=16, **sizes)
    for name, num_tokens in {"long": 100, "a": 15, "b": 15}.items():
        scheduler.add(request(name, num_tokens))
    assert prompts(scheduler.schedule()) == [("long", 34), ("a", 15), ("b", 15)]
