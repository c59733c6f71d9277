"""Policies of the prefix cache: what goes first, and that nothing that is held ever goes."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.cached_start import Place
from engine.memory.eviction import LruEviction
from engine.memory.index_pool import IndexPool
from engine.memory.prefix_cache import PrefixCache
from engine.memory.start_sizes import StartSizes
from engine.memory.value_eviction import ValueEviction
from twinfang.cache_sim.budget import Pools
from wire.messages.prefixes import block_keys

SIZES = StartSizes(block_tokens=1, block_bytes=1, slot_bytes=4, token_flops=100.0, pair_flops=1.0)
PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=10)


def make(policy, num_blocks=1000, num_slots=1000):
    blocks, slots = IndexPool(num_blocks + 1, "block"), IndexPool(num_slots + 1, "slot")
    return PrefixCache(blocks, slots, block_size=1, fingerprint="f", policy=policy)


def begin(cache, tokens, places=None):
    """A request up to the end of its prompt. Returns its nodes and the state that it reads."""
    keys = block_keys(tokens, block_size=1, fingerprint="f", salt="")
    match = cache.match(keys, needs_state=True)
    cache.used(match)
    nodes = list(match.nodes)
    cache.hold(nodes)
    if match.state is not None:
        cache.hold_state(match.state)
    new = cache.allocate_blocks(len(tokens) - len(nodes))
    held = cache.blocks_of(nodes) + new
    num_own = len(nodes)
    cache.extend(nodes, keys, len(keys), held)
    cache._blocks.free([one for one, node in zip(new, nodes[num_own:], strict=True) if node.block_id != one])
    for length, place in (places if places is not None else {len(tokens): Place.END}).items():
        if nodes[length - 1].state is None and cache.num_available_slots:
            cache.release_state(cache.put_state(nodes[length - 1], cache.allocate_slot(), place))
    return nodes, match.state


def end(cache, nodes, state):
    if state is not None:
        cache.release_state(state)
    cache.release(reversed(nodes))


def serve(cache, tokens, places=None):
    nodes, state = begin(cache, tokens, places)
    end(cache, nodes, state)
    return 0 if state is None else state.node.num_blocks


def starts(cache):
    return {state.node.num_blocks for state in cache._states}


def test_long_waits_count_up_to_twice():
    """A state weighs as much as the KV of 4 tokens, so a prompt of 8 is a long one."""
    flops = [SIZES.flops(0, length) for length in (1, 8, 80)]
    weights = [SIZES.weighed_flops(0, length) / one for length, one in zip((1, 8, 80), flops, strict=True)]
    assert weights == [1.0 + flops[0] / flops[1], 2.0, 2.0]


@pytest.mark.parametrize("make_policy", [LruEviction, lambda: ValueEviction(SIZES)])
@settings(deadline=None)
@given(data=st.data(), lives=st.lists(PROMPT, max_size=30))
def test_what_a_request_holds_stays_and_all_memory_comes_back(make_policy, data, lives):
    cache = make(make_policy(), num_blocks=24, num_slots=4)
    running = []
    for tokens in lives:
        if running and (
            cache.num_available_blocks < len(tokens) or data.draw(st.booleans(), label="a request ends")
        ):
            end(cache, *running.pop(data.draw(st.integers(0, len(running) - 1))))
        if cache.num_available_blocks >= len(tokens):
            running.append(begin(cache, tokens))
        for nodes, state in running:
            assert all(node.is_cached for node in nodes)
            assert state is None or state.node.state is state
    while running:
        end(cache, *running.pop())
    cache.clear()
    assert (cache._blocks.num_free, cache._slots.num_free) == (24, 4)
    assert not cache._nodes


def test_lru_gives_up_the_start_that_was_used_least_recently():
    cache = make(LruEviction(), num_slots=2)
    for tokens in ([1, 1], [2, 2, 2], [1, 1], [3] * 5):
        serve(cache, tokens)
    assert starts(cache) == {2, 5}


def test_value_gives_up_what_is_computed_again_fastest():
    cache = make(ValueEviction(SIZES), num_slots=2)
    for tokens in ([1] * 200, [2] * 2, [3] * 300):
        serve(cache, tokens)
    assert starts(cache) == {200, 300}


def test_a_start_close_behind_another_saves_little():
    cache = make(ValueEviction(SIZES), num_slots=2)
    serve(cache, [1] * 100, {98: Place.INNER, 100: Place.INNER})
    serve(cache, [2] * 50)
    assert starts(cache) == {98, 50}


def test_kv_that_leads_to_no_start_goes_first():
    cache = make(ValueEviction(SIZES), num_blocks=12)
    serve(cache, [1] * 4)
    serve(cache, [2] * 8, {2: Place.INNER})
    serve(cache, [3] * 6)
    assert serve(cache, [1] * 4) == 4
    assert serve(cache, [2] * 2) == 2


def test_what_was_used_again_and_again_stays_through_a_scan():
    cache = make(ValueEviction(SIZES), num_slots=8)
    luck = random.Random(1)
    hits = 0
    for number in range(600):
        serve(cache, [1000 + number] * luck.randint(8, 12))
        if number % 10 == 0:
            hits += serve(cache, [7] * 10) > 0
    assert hits >= 50


def test_the_reuse_of_a_class_is_learned_even_if_the_cache_is_too_small_to_hold_it():
    """Starts inside prompts are used again after 20 requests, those at ends never. There is room for 12: a
    cache that gives up the oldest has none of them in time."""

    def num_hits(policy):
        cache = make(policy, num_slots=12)
        late = []
        for number in range(1200):
            serve(cache, [number] * 30, {29: Place.INNER, 30: Place.END})
            if number >= 20:
                hit = serve(cache, [*([number - 20] * 29), -number], {30: Place.END})
                late.append(hit > 0)
        return sum(late[-200:])

    assert num_hits(LruEviction()) == 0
    assert num_hits(ValueEviction(SIZES)) > 80


def test_blocks_and_states_make_room_for_each_other_in_one_budget():
    pools = Pools.shared(60, SIZES)
    policy = ValueEviction(SIZES, shares_memory=True)
    cache = PrefixCache(pools.blocks, pools.slots, block_size=1, fingerprint="f", policy=policy)
    serve(cache, [1] * 20, {5: Place.INNER, 10: Place.INNER, 15: Place.INNER, 20: Place.END})
    assert len(cache._states) == 4
    serve(cache, [2] * 30, {30: Place.END})
    assert pools.blocks.num_free >= 0
    assert any(state.node.num_blocks == 30 for state in cache._states)
    cache.clear()
    assert pools.blocks.num_free == 60


def test_equal_requests_in_equal_order_give_up_the_same():
    """Ranks decide alike: nothing depends on a clock or on addresses of objects."""

    def life():
        cache = make(ValueEviction(SIZES), num_blocks=60, num_slots=6)
        luck, trail = random.Random(5), []
        for _ in range(400):
            prompt = [luck.randint(0, 3)] * luck.randint(1, 12) + [luck.randint(0, 9)] * luck.randint(1, 12)
            serve(cache, prompt)
            trail.append(sorted((state.node.key, state.slot) for state in cache._states))
        return trail

    assert life() == life()
