"""A memory budget becomes pool sizes, or a refusal that shows the computation. The sizes are large enough."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.memory.caches import CacheSpec
from engine.request import Request
from engine.schedule.cache_modes import make_cache_mode
from engine.schedule.capacity import CapacityPlan, Demand, blocks_for, count_slots
from engine.schedule.scheduler import Scheduler
from wire.errors import CapacityError
from wire.messages.handoff import Ticket
from wire.messages.sampling_params import SamplingParams

SPEC = CacheSpec(
    attn_layers=2,
    kv_heads=2,
    head_dim=16,
    kv_dtype=torch.float32,
    mamba_layers=3,
    conv_channels=96,
    conv_width=4,
    mamba_heads=4,
    mamba_head_dim=16,
    state_size=8,
    conv_dtype=torch.float32,
    ssm_dtype=torch.float32,
)
BLOCK = 4

DEMANDS = st.builds(
    Demand,
    st.builds(replace, st.just(SPEC), attn_layers=st.integers(1, 8), mamba_layers=st.integers(1, 8)),
    role=st.sampled_from(["prefill", "decode", "both"]),
    max_model_len=st.integers(1, 5000),
    max_num_seqs=st.integers(1, 100),
    block_size=st.integers(1, 64),
    cache_mode=st.sampled_from(["none", "align", "all"]),
    num_cached_states=st.none() | st.integers(0, 200),
    num_speculative=st.integers(0, 5),
)


def demand(**changes):
    fields = {"spec": SPEC, "role": "decode", "max_model_len": 256, "max_num_seqs": 8, "block_size": 16}
    return Demand(**(fields | changes))


# --- sizes -----------------------------------------------------------------------------------------


def test_slots_are_counted_first_and_blocks_get_the_rest():
    made = demand().within(1 << 20)
    assert made.num_slots == 9
    assert made.num_blocks == ((1 << 20) - 9 * SPEC.slot_bytes) // SPEC.block_bytes(16)
    assert made.num_bytes <= 1 << 20


@pytest.mark.parametrize(
    ("changes", "total"),
    [
        ({}, 1 + 8),
        ({"num_speculative": 3}, 1 + 8 * 4),
        ({"role": "prefill"}, 1 + 8 + 8),
        ({"role": "both"}, 1 + 8),
        ({"cache_mode": "all"}, 1 + 8 + 16),
        ({"cache_mode": "align"}, 1 + 8 + 16),
        ({"cache_mode": "all", "num_cached_states": 8}, 1 + 8 + 8),
        ({"cache_mode": "all", "num_cached_states": 3}, 1 + 8 + 3 + 5),
        ({"cache_mode": "all", "num_cached_states": 0}, 1 + 8 + 0 + 8),
        ({"cache_mode": "none", "num_cached_states": 5}, 1 + 8),
        ({"role": "prefill", "num_speculative": 1, "cache_mode": "all"}, 1 + 16 + 8 + 16),
    ],
    ids=str,
)
def test_slots_are_null_running_leased_cached_and_those_being_read(changes, total):
    assert demand(**changes).within(1 << 30).num_slots == total


def test_no_more_blocks_than_all_sequences_at_full_length_can_use():
    assert demand().within(1 << 34).num_blocks == 1 + 8 * (16 + 1)
    assert demand(role="prefill").within(1 << 34).num_blocks == 1 + 2 * 8 * 16


@pytest.mark.parametrize("k", range(16))
def test_a_block_table_has_columns_for_the_drafts_of_a_row_at_the_end_of_its_context(k):
    made = demand(max_model_len=30, block_size=BLOCK, num_speculative=k).within(1 << 30)
    assert made.table_columns == -(-(30 + k) // BLOCK)
    assert made.blocks_per_seq == 8


def test_a_state_of_a_30b_model_weighs_as_much_as_8000_tokens_of_its_kv():
    """23 Mamba layers of 64 heads x 64 x 128, 8 groups; 6 attention layers of 2 heads x 128."""
    bfloat16, ssm = torch.bfloat16, torch.float32
    spec = CacheSpec(6, 2, 128, bfloat16, 23, 64 * 64 + 2 * 8 * 128, 4, 64, 64, 128, bfloat16, ssm)
    nano = Demand(spec, role="decode", max_model_len=262144, max_num_seqs=64, block_size=16)
    conv = (64 * 64 + 2 * 8 * 128) * 3 * 2
    assert nano.slot_bytes == 23 * (64 * 64 * 128 * 4 + conv)
    assert nano.token_bytes == 6 * 2 * 2 * 128 * 2 == 6144
    assert nano.slot_bytes / nano.token_bytes == pytest.approx(8000, rel=0.01)
    drafting = replace(nano, num_speculative=3)
    assert drafting.min_bytes - nano.min_bytes == 3 * 64 * nano.slot_bytes


# --- every accepted plan ---------------------------------------------------------------------------


@given(asked=DEMANDS, spare=st.integers(0, 1 << 24))
def test_every_accepted_plan_fits_its_budget_and_holds_what_it_promises(asked, spare):
    budget = asked.min_bytes + spare
    made = asked.within(budget)
    assert made.num_bytes <= budget
    assert made.num_slots >= 1 + asked.max_num_seqs * (1 + asked.num_speculative)
    assert made.num_full_seqs >= 1
    assert made.num_blocks - 1 >= 2 * asked.max_num_seqs
    assert (made.num_blocks - 1) * asked.block_size >= asked.max_num_seqs * (2 + 2 * asked.num_speculative)
    assert made.num_tokens >= asked.max_model_len
    if made.num_blocks < asked.max_blocks:
        assert budget - made.num_bytes < made.block_bytes


@given(asked=DEMANDS)
def test_the_smallest_budget_that_fits_is_accepted_and_one_byte_less_is_not(asked):
    assert asked.within(asked.min_bytes).num_bytes == asked.min_bytes
    with pytest.raises(CapacityError):
        asked.within(asked.min_bytes - 1)


@given(asked=DEMANDS, short=st.floats(0, 1, exclude_max=True))
def test_every_value_that_a_refusal_names_fits_and_the_next_larger_one_does_not(asked, short):
    budget = int(asked.min_bytes * short)
    with pytest.raises(CapacityError) as refusal:
        asked.within(budget)
    remedies = refusal.value.message.rpartition(" would fit: ")[2].split(", ")
    found = dict(remedy.replace("`", "").split() for remedy in remedies)
    assert int(found.pop("cache_memory_bytes")) == asked.min_bytes
    fields = {name: name for name in ("max_num_seqs", "max_model_len", "num_speculative")}
    fields["cached_states"] = "num_cached_states"
    for setting, value in found.items():
        replace(asked, **{fields[setting]: int(value)}).within(budget)
        with pytest.raises(CapacityError):
            replace(asked, **{fields[setting]: int(value) + 1}).within(budget)


def test_a_refusal_shows_the_arithmetic_and_what_would_fit():
    with pytest.raises(CapacityError) as refusal:
        demand(num_speculative=1, cache_mode="all").within(400_000)
    message = refusal.value.message
    assert "the cache budget of 390.62 KiB is too small" in message
    assert "33 state slots (1 null + 8 sequences x (1 + 1) running + 16 cached) x 9.75 KiB" in message
    assert "17 KV blocks (1 null + one sequence of 256 tokens at 16 a block) x 8.00 KiB" in message
    assert re.search(
        r"would fit: `cache_memory_bytes` \d+, `max_num_seqs` \d, `cached_states` \d+, ", message
    )


def test_a_leased_state_and_short_contexts_show_in_the_refusal():
    with pytest.raises(CapacityError) as refusal:
        demand(role="prefill", max_model_len=8, cache_mode="all", num_cached_states=2).within(0)
    assert "+ 8 leased + 2 cached + 6 so that each sequence can read a cached state)" in refusal.value.message
    assert "17 KV blocks (1 null + 2 for each of 8 sequences)" in refusal.value.message
    assert re.search(r"; this would fit: `cache_memory_bytes` \d+$", refusal.value.message)


# --- the promise, kept by the scheduler ------------------------------------------------------------


def scheduler_of(plan, mode, max_num_seqs):
    return Scheduler(
        plan,
        make_cache_mode(mode, plan.block_size, 2 * plan.block_size, has_state=plan.has_state),
        max_num_seqs=max_num_seqs,
        max_batch_tokens=10_000,
        num_positions=1 + plan.num_speculative,
    )


def smallest(role, max_num_seqs, mode="none", **changes):
    asked = demand(role=role, max_num_seqs=max_num_seqs, block_size=BLOCK, cache_mode=mode, **changes)
    return asked.within(asked.min_bytes)


def step(scheduler):
    compute(scheduler, scheduler.schedule())


def compute(scheduler, plan, num_right=lambda: 0):
    """What the engine does to requests in a step; ``num_right`` drafts of each decode row are right."""
    scheduler.launched(plan)
    for row in plan.rows:
        request, num_accepted = row.request, 1
        if row.samples:
            left = request.params.max_tokens - request.num_output
            num_accepted = min(1 + (num_right() if row.is_decode else 0), left)
            request.tokens += [0] * num_accepted
        scheduler.landed(row, num_accepted)
        if request.prefill_only and request.num_computed == request.target:
            scheduler.hold(request)
        elif row.samples and request.num_output == request.params.max_tokens:
            scheduler.finish(request)


def run_to_end(scheduler, *names):
    for _ in range(500):
        if not any(scheduler.find_active(name) for name in names):
            return
        step(scheduler)
    raise AssertionError(f"{names} never end")


@pytest.mark.parametrize("k", [0, 1, 3, 15])
@pytest.mark.parametrize("max_model_len", [4, 16, 64])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 7, 40])
def test_the_smallest_plan_runs_max_num_seqs_short_sequences_at_once(max_num_seqs, max_model_len, k):
    """With one block a sequence, half of them would wait: admission keeps room for each to grow into."""
    plan = smallest("decode", max_num_seqs, max_model_len=max_model_len, num_speculative=k)
    scheduler = scheduler_of(plan, "none", max_num_seqs)
    for i in range(max_num_seqs):
        scheduler.add(Request(str(i), [i, i, i], SamplingParams(max_tokens=1)))
    assert len(scheduler.schedule().rows) == max_num_seqs


@pytest.mark.parametrize("max_model_len", [4, 16, 64])
def test_the_smallest_prefill_plan_runs_as_many_sequences_as_it_leases(max_model_len):
    scheduler = scheduler_of(smallest("prefill", 8, max_model_len=max_model_len), "none", 8)
    for i in range(16):
        scheduler.add(Request(str(i), [i, i, i], None))
    step(scheduler)
    assert len(scheduler.held) == 8
    assert len(scheduler.schedule().rows) == 8


@pytest.mark.parametrize("k", [0, 1, 3, 15])
@pytest.mark.parametrize("max_model_len", [2, 5, 16, 63, 64])
def test_the_largest_plan_runs_max_num_seqs_sequences_of_full_length_at_once(max_model_len, k):
    asked = demand(max_num_seqs=5, block_size=BLOCK, max_model_len=max_model_len, num_speculative=k)
    scheduler = scheduler_of(asked.within(1 << 30), "none", 5)
    for i in range(5):
        scheduler.add(Request(str(i), [i] * (max_model_len - 1), SamplingParams(max_tokens=1)))
    assert len(scheduler.schedule().rows) == 5


@given(
    max_num_seqs=st.integers(1, 5),
    num_cached=st.integers(0, 6),
    role=st.sampled_from(["prefill", "decode"]),
    mode=st.sampled_from(["align", "all"]),
    lengths=st.lists(st.integers(6, 40), min_size=12, max_size=12),
    families=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    k=st.integers(0, 2),
    luck=st.randoms(use_true_random=False),
)
def test_slots_never_keep_a_sequence_waiting_whatever_is_cached(
    max_num_seqs, num_cached, role, mode, lengths, families, k, luck
):
    """Every sequence may hold a cached state to read, and every leased one be such a state."""
    k = 0 if role == "prefill" else k
    slots = count_slots(
        role=role,
        max_num_seqs=max_num_seqs,
        num_speculative=k,
        cache_mode=mode,
        num_cached_states=num_cached,
    )
    scheduler = scheduler_of(CapacityPlan(2000, slots.total, BLOCK, 1, 1, 256, k), mode, max_num_seqs)
    for i, (length, family) in enumerate(zip(lengths, families, strict=True)):
        params = None if role == "prefill" else SamplingParams(max_tokens=20)
        scheduler.add(Request(str(i), [family] * length, params))
    for _ in range(300):
        plan = scheduler.schedule()
        if scheduler.waiting and len(scheduler.held) <= max_num_seqs and not plan.prefilled:
            assert not scheduler.owned.free_rows, "a row is free, yet a request waits"
        compute(scheduler, plan, lambda: luck.randint(0, k))
        for name in list(scheduler.held)[: max(0, len(scheduler.held) - max_num_seqs)]:
            scheduler.release(name)
    assert not scheduler.waiting


def test_without_a_slot_to_read_from_a_request_with_a_cached_prefix_would_wait_for_another_to_end():
    """What the count prevents: one slot a sequence, and the last free one holds what the newcomer reads."""

    def newcomer_is_admitted(num_slots):
        scheduler = scheduler_of(CapacityPlan(200, num_slots, BLOCK, 1, 1, 256), "align", 2)
        scheduler.add(Request("first", [1] * 20, SamplingParams(max_tokens=1)))
        run_to_end(scheduler, "first")
        assert scheduler.owned.cache.num_cached_states == 1
        scheduler.add(Request("long", [2] * 3, SamplingParams(max_tokens=200)))
        step(scheduler)
        scheduler.add(Request("newcomer", [1] * 20, SamplingParams(max_tokens=1)))
        for _ in range(50):
            step(scheduler)
        return scheduler.find_active("newcomer") is None

    counted = {"role": "decode", "num_speculative": 0, "cache_mode": "align", "num_cached_states": 0}
    slots = count_slots(max_num_seqs=2, **counted)
    assert newcomer_is_admitted(slots.total)
    assert not newcomer_is_admitted(slots.total - slots.read)


def test_a_leased_state_that_is_the_prefix_caches_costs_no_second_slot():
    scheduler = scheduler_of(CapacityPlan(50, 20, BLOCK, 1, 1, 256), "all", 2)
    for name in ("computed", "found in the cache"):
        scheduler.add(Request(name, [1] * 9, None))
        step(scheduler)
        assert scheduler.held[name].memory.slots == []
        assert scheduler.held[name].memory.state_slot != 0
    assert scheduler.owned.slots.capacity - scheduler.owned.slots.num_free == 1
    scheduler.release("computed")
    scheduler.release("found in the cache")
    assert scheduler.owned.cache.num_available_slots == scheduler.owned.slots.capacity


def test_a_preempted_request_that_needs_every_block_comes_back():
    """A spare block that nobody else needs would keep it out for ever."""
    plan = smallest("decode", 2, max_model_len=64)
    assert plan.num_blocks == 1 + 16
    scheduler = scheduler_of(plan, "none", 2)
    ticket = Ticket("slow", 0, 0, "h:1", "i", 2, (1,), 1, 1.0)
    scheduler.add(Request("slow", [0, 0, 0], SamplingParams(max_tokens=1), ticket=ticket))
    scheduler.add(Request("large", [1] * 50, SamplingParams(max_tokens=14)))
    while "large" not in scheduler.preempted:
        step(scheduler)
    large = scheduler.preempted["large"]
    assert blocks_for(large.target, BLOCK) == 16
    scheduler.quarantine(scheduler.transferring["slow"])
    scheduler.release("slow")
    run_to_end(scheduler, "large")


# --- models that keep only one of the two ----------------------------------------------------------

STATELESS = replace(SPEC, mamba_layers=0)
WITHOUT_KV = replace(SPEC, attn_layers=0)


@given(asked=DEMANDS, spec=st.sampled_from([STATELESS, WITHOUT_KV]), more=st.integers(0, 1 << 20))
def test_what_a_model_does_not_keep_takes_no_memory_and_no_entries(asked, spec, more):
    asked = replace(asked, spec=spec)
    made = asked.within(asked.min_bytes + more)
    assert (made.num_slots == 1) == (spec is STATELESS)
    assert (made.num_blocks == 1) == (spec is WITHOUT_KV)
    assert made.num_bytes <= asked.min_bytes + more
    assert asked.min_bytes == (asked.min_blocks * asked.block_bytes or asked.slots_bytes)
    if spec is STATELESS:
        assert asked.slots.total == 1
        assert made.max_held == made.num_blocks - 1
    else:
        assert (made.num_tokens, made.num_full_seqs, made.table_columns) == (None, None, 1)
        assert made.blocks_for(1 << 40) == 0


@given(asked=DEMANDS, spec=st.sampled_from([STATELESS, WITHOUT_KV]))
def test_a_refusal_names_only_what_the_model_keeps(asked, spec):
    asked = replace(asked, spec=spec)
    with pytest.raises(CapacityError) as refusal:
        asked.within(asked.min_bytes - 1)
    assert ("state slots" in refusal.value.message) == (spec is WITHOUT_KV)
    assert ("KV blocks" in refusal.value.message) == (spec is STATELESS)


def test_drafts_and_cached_states_cost_a_model_without_states_nothing_but_room_to_grow():
    plain, drafting = demand(spec=STATELESS), demand(spec=STATELESS, num_speculative=3, cache_mode="all")
    assert plain.min_bytes == drafting.min_bytes == 17 * SPEC.block_bytes(16)


def test_a_context_of_any_length_takes_a_model_without_kv_no_memory():
    short, long = (demand(spec=WITHOUT_KV, max_model_len=length) for length in (16, 1 << 20))
    assert short.min_bytes == long.min_bytes == 9 * SPEC.slot_bytes


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("spec", [STATELESS, WITHOUT_KV], ids=["no states", "no KV"])
def test_the_smallest_plan_of_such_a_model_runs_max_num_seqs_sequences_at_once(spec, k, role):
    k = 0 if role == "prefill" else k
    mode = "all"
    asked = demand(spec=spec, role=role, block_size=BLOCK, cache_mode=mode, num_speculative=k)
    plan = asked.within(asked.min_bytes)
    scheduler = scheduler_of(plan, mode, 8)
    for i in range(16):
        params = None if role == "prefill" else SamplingParams(max_tokens=1)
        scheduler.add(Request(str(i), [i, i, i], params))
    assert len(scheduler.schedule().rows) == 8


def test_a_prompt_longer_than_any_pool_runs_where_there_is_no_kv():
    asked = demand(spec=WITHOUT_KV, max_model_len=1 << 20, block_size=BLOCK, max_num_seqs=2, cache_mode="all")
    scheduler = scheduler_of(asked.within(asked.min_bytes), "all", 2)
    for name in ("a", "b"):
        scheduler.add(Request(name, [1] * 30_000, SamplingParams(max_tokens=3)))
    run_to_end(scheduler, "a", "b")
    nodes = scheduler.owned.cache._nodes
    assert scheduler.owned.cache.num_cached_states > 0
    scheduler.owned.cache.clear()
    assert not nodes


def test_equal_prompts_without_states_are_leased_without_end_of_slots():
    """Nothing but blocks bounds how many a prefill server leases, and equal prompts share these."""
    asked = demand(spec=STATELESS, role="prefill", max_num_seqs=2, block_size=BLOCK, cache_mode="all")
    plan = asked.within(asked.min_bytes)
    scheduler = scheduler_of(plan, "all", 2)
    for i in range(plan.max_held + 3):
        scheduler.add(Request(str(i), [1] * 9, None))
    for _ in range(3 * plan.max_held):
        step(scheduler)
    assert len(scheduler.held) == plan.max_held
    assert len(scheduler.waiting) == 3
